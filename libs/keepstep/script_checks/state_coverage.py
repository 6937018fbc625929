"""Find out which parameters a registered state contains: by their memory, or in copies by their values."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from keepstep.state.values.sharding import is_dtensor
from keepstep.state.values.tensors_in_containers import tensors_in

SAMPLE_ELEMENTS = 256
"""Elements that are compared to recognize a copy."""


def memory_of(tensor: torch.Tensor) -> tuple[str, int]:
    """Return the device and address of the memory of ``tensor``, for a DTensor of its shard here.

    For a tensor that wraps others: of the first one.
    """
    tensor = next(tensors_in(tensor), tensor)
    local = tensor.to_local() if is_dtensor(tensor) else tensor
    return str(local.device), local.untyped_storage().data_ptr()


class StateCoverage:
    """The tensors of a registered state.

    Args:
        state: containers of tensors and other values.
    """

    def __init__(self, state: Any) -> None:
        self._tensors = [one for one in tensors_in(state) if one.numel()]
        self._memory = {memory_of(one) for one in self._tensors}
        self._samples: set[tuple[Any, ...]] | None = None

    def has(self, parameter: torch.Tensor) -> bool:
        """Return whether the state contains ``parameter`` or a copy of it."""
        if not parameter.numel() or memory_of(parameter) in self._memory:
            return True
        if self._samples is None:  # a state of copies, on the CPU for example
            self._samples = {_sample(one) for one in self._tensors}
        return _sample(parameter) in self._samples


def sampled(parameters: Sequence[torch.Tensor]) -> str:
    """Return number and digest of ``parameters``: of their shapes and first values. Equal ones have equal digests."""
    samples = repr([_sample(one) for one in parameters])
    return f"{len(parameters)} with digest {hashlib.blake2b(samples.encode(), digest_size=4).hexdigest()}"


def _sample(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Return the shape and the first values. A DTensor that was gathered has other first values than its shards."""
    shape = tuple(tensor.shape)
    if is_dtensor(tensor):
        return shape, "sharded"
    first = tensor.detach().reshape(-1)[:SAMPLE_ELEMENTS].to("cpu", torch.float64)
    return shape, tuple(first.tolist())
