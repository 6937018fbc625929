"""Tensors of an accelerator in two processes, by CUDA IPC handles.

The handle is torch's tuple of numbers and bytes. The exporting process must keep the tensor until the other process
has released it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch


def can_export(tensor: torch.Tensor) -> bool:
    """Return whether another process can map the tensor's device memory."""
    return tensor.device.type == "cuda"


def export(tensor: torch.Tensor) -> list[Any]:
    """Return a handle of the tensor's memory, after the work that the current stream has for it."""
    torch.cuda.current_stream(tensor.device).synchronize()  # the child's stream does not follow this one
    storage: Any = tensor.untyped_storage()
    return [list(storage._share_cuda_()), tensor.storage_offset(), list(tensor.stride())]


def attach(handle: Sequence[Any], dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return the memory of a handle as a tensor of this process."""
    shared, offset, stride = handle
    torch.cuda.init()  # type: ignore[no-untyped-call]
    storage = cast("Any", torch.UntypedStorage)._new_shared_cuda(*shared)  # noqa: SLF001  no public name
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, tuple(shape), tuple(stride))
