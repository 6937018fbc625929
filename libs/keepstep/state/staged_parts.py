"""Copies of parts in CPU memory, which training does not change, in a buffer that the next save uses again.

A copy into fresh memory takes about five times as long, because the kernel hands out each of its pages.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any, TypeAlias

import torch

from keepstep.state.device_copies import device_copies
from keepstep.state.local_parts import ObjectPart, Part, TensorPart
from keepstep.state.pack_layout import describe
from keepstep.state.values.leaves import copy_elements
from keepstep.state.values.tensor_subclasses import Wrapped, is_wrapper, plain
from keepstep.state.values.tensors_in_containers import outer_tensors_in

ALIGNMENT = 64
LARGEST_EXCESS = 2
"""A buffer is not used for a state that needs less than its size divided by this: its memory is freed instead."""
Identity: TypeAlias = tuple[Any, ...]


class StagingBuffers:
    """Keeps at most one buffer: that of the last save, for the next one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: torch.Tensor | None = None

    def take(self, size: int) -> torch.Tensor:
        """Return at least ``size`` bytes."""
        with self._lock:
            buffer, self._free = self._free, None
        if buffer is not None and size <= len(buffer) <= LARGEST_EXCESS * size:
            return buffer
        del buffer  # before the next one is allocated
        return torch.empty(size, dtype=torch.uint8)

    def give_back(self, buffer: torch.Tensor) -> None:
        with self._lock:
            self._free = buffer


BUFFERS = StagingBuffers()
"""Those of this process."""


class StagedParts:
    """A copy of ``parts``. Tied tensors remain tied. Call ``release`` when the copy is not used any more.

    Raises:
        Exception: a tensor cannot be copied, such as one without memory.
    """

    def __init__(self, parts: Mapping[str, Part], buffers: StagingBuffers = BUFFERS) -> None:
        self._buffers = buffers
        wrapped: list[Wrapped] = []
        values = {key: part.value for key, part in parts.items() if isinstance(part, ObjectPart)}
        objects = _copied(values, wrapped)
        inner = [one for whole in wrapped for one in _inner(whole)]
        tensors = {_identity(one): one.detach() for one in (*_tensors(parts), *(tensor for _, _, tensor in inner))}
        *starts, size = accumulate((_aligned(tensor.nbytes) for tensor in tensors.values()), initial=0)
        self._buffer = buffers.take(size)
        with self._given_back_after_error():
            with device_copies() as copy_from_device:
                self._copies = {
                    identity: _copy_into(self._buffer[start : start + tensor.nbytes], tensor, copy_from_device)
                    for start, (identity, tensor) in zip(starts, tensors.items(), strict=True)
                }
            for whole, name, tensor in inner:
                whole.inner[name] = self._copies[_identity(tensor)]
            self.parts = {key: self._staged(part, objects.get(key)) for key, part in parts.items()}

    def release(self) -> None:
        """Give the memory back. ``parts`` must not be used after it."""
        self._buffers.give_back(self._buffer)

    @contextmanager
    def _given_back_after_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.release()
            raise

    def _staged(self, part: Part, value: Any) -> Part:
        if isinstance(part, ObjectPart):
            return ObjectPart(part.path, value)
        return replace(part, pieces=tuple((box, self._copies[_identity(tensor)]) for box, tensor in part.pieces))


def _tensors(parts: Mapping[str, Part]) -> Iterator[torch.Tensor]:
    for part in parts.values():
        if isinstance(part, TensorPart):
            yield from (tensor for _, tensor in part.pieces)


def _copied(values: dict[str, Any], wrapped: list[Wrapped]) -> dict[str, Any]:
    """Return a copy of objects. Tensors that wrap others become ``Wrapped``, and are added to ``wrapped``.

    Raises:
        UnsupportedValue: an object has a value that cannot be stored, nor copied.
    """
    try:
        tensors = list(outer_tensors_in(values))
        found = {id(one): Wrapped.of(one) for one in tensors if is_wrapper(one)}
        wrapped += found.values()
        known: dict[int, Any] = dict(found)
        for one in tensors:
            if one.grad_fn is not None and id(one) not in known:  # deepcopy refuses it
                known[id(one)] = copy.deepcopy(one.detach(), known)
        return copy.deepcopy(values, known)
    except Exception:
        describe(values)  # names the value
        raise


def _inner(whole: Wrapped) -> Iterator[tuple[Wrapped, str, torch.Tensor]]:
    """Yield the tensors in a wrapper. An inner wrapper becomes ``Wrapped``."""
    for name, one in whole.inner.items():
        if is_wrapper(one):
            whole.inner[name] = Wrapped.of(one)
            yield from _inner(whole.inner[name])
        else:
            yield whole, name, plain(one, f"{whole.name}.{name}")


def _identity(tensor: torch.Tensor) -> Identity:
    if not tensor.numel():
        return (tensor.dtype, tensor.shape)
    of_view = (tensor.is_conj(), tensor.is_neg())  # of the same memory: other values
    return (tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride(), of_view)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _copy_into(
    memory: torch.Tensor, tensor: torch.Tensor, copy_from_device: Callable[[torch.Tensor, torch.Tensor], None]
) -> torch.Tensor:
    target = memory.view(tensor.dtype).view(tensor.shape)
    if tensor.is_cuda:
        copy_from_device(memory, tensor)
        return target
    return copy_elements(target, tensor)
