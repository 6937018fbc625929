"""Memory for the pack of a state: existing tensors where they fit, and new memory; then the state from it."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from keepstep.runtime.host_memory import available_bytes, ranks_of_host
from keepstep.state.pack_layout import may_overlap_itself
from keepstep.state.value_building import build_value, is_absent, shard_here
from keepstep.state.values.leaves import TORCH_DTYPES, copy_elements, numpy_dtype
from keepstep.state.values.sharding import MeshFinder, is_dtensor, to_dtensor
from keepstep.state.values.tensor_subclasses import is_wrapper
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import ManifestError
from keepstep_mesh.protocol.manifest import ALIGNMENT, CHUNK_BYTES
from keepstep_mesh.protocol.state_content import BYTES, NUMPY, Content, Sharding, TensorEntry

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

log = get_logger("keepstep.state")

Spare = Mapping[int, torch.Tensor]
"""Memory of an earlier ``Destination``, by region."""


class Destination:
    """Memory for the pack of ``content``: the tensors of ``into`` that fit, and new memory for all other regions.

    A DTensor without a counterpart in ``into`` is built on the device mesh of this process that fits it. If several
    fit, it is the mesh of the DTensors in ``into`` that are sharded alike: an optimizer's state is, as its parameter.

    Args:
        content: structure of the state.
        into: state to receive into. Default: all memory is new.
        spare: memory to reuse where it fits. Its content is kept: it may have chunks of an earlier transfer. New memory
            beside it begins with the content of ``into``. None: new memory has no content.

    Raises:
        ManifestError: the machine, or the container, has too little memory.
        StateMismatch: a DTensor has another sharding in ``into``, or no device mesh fits it.
    """

    def __init__(self, content: Content, into: Any = None, spare: Spare | None = None) -> None:
        self._content = content
        self._into = into
        targets: list[list[Any]] = [[] for _ in content.tensors]
        new_dtensors: dict[int, str] = {}
        known: list[tuple[Sharding, DeviceMesh]] = []

        def note(index: int, target: Any, path: str) -> Any:
            entry = content.tensors[index]
            targets[index].append(_local(entry, target, path))
            if entry.sharding is not None:
                if is_absent(target):
                    new_dtensors[index] = path
                else:
                    known.append((entry.sharding, target.device_mesh))

        def note_shard(sharding: Sharding, _local: Any, target: Any, _path: str) -> None:
            if target is not None:
                known.append((sharding, target.device_mesh))

        with torch.no_grad():
            build_value(content.tree, into, "state", note, note_shard)
            self._in_place = self._choose(targets)
        self._finder = finder = MeshFinder(known)
        self._meshes = {
            index: finder.find(entry.sharding, entry.shape, path)
            for index, path in new_dtensors.items()
            if (entry := content.tensors[index]).sharding is not None
        }
        """The mesh of each new DTensor, by its index among the tensors."""
        wanted = {region: size for region, size in enumerate(content.regions) if region not in self._in_place}
        self.fresh = {region: one for region, one in (spare or {}).items() if wanted.get(region) == len(one)}
        needed = sum(size for region, size in wanted.items() if region not in self.fresh)
        _check_room(needed)
        new = wanted.keys() - self.fresh.keys()
        make = torch.empty if spare is None else torch.zeros
        self.fresh |= {region: make(wanted[region], dtype=torch.uint8) for region in sorted(new)}
        if spare is not None:
            self._fill(new, targets)
        self._parts: list[memoryview] = []
        self._starts: list[int] = []
        self.pack_bytes = 0
        gap = memoryview(bytearray(ALIGNMENT))
        for region, position in enumerate(content.positions()[:-1]):
            self._append(gap[: position - self.pack_bytes])
            self._append(self._memory(region))

    def _fill(self, regions: AbstractSet[int], targets: list[list[Any]]) -> None:
        """Copy the tensors and arrays of ``into`` that lie in ``regions``: on a device, or in another order there."""
        with torch.no_grad():
            for entry, choices in zip(self._content.tensors, targets, strict=True):
                held = next((one for one in choices if one is not None), None) if entry.region in regions else None
                if isinstance(held, torch.Tensor):
                    copy_elements(self._value(entry), held)
                elif held is not None:
                    self._value(entry)[...] = held

    def _append(self, part: memoryview) -> None:
        if part.nbytes:
            self._parts.append(part)
            self._starts.append(self.pack_bytes)
            self.pack_bytes += part.nbytes

    @property
    def in_place_bytes(self) -> int:
        """Bytes of the state that are received directly into ``into``."""
        return sum(self._content.regions[region] for region in self._in_place)

    def segments(self, chunk: int) -> Iterator[memoryview]:
        """Yield the memory for the bytes of a chunk, in order."""
        start = chunk * CHUNK_BYTES
        end = min(start + CHUNK_BYTES, self.pack_bytes)
        number = bisect_right(self._starts, start) - 1
        while start < end:
            within = start - self._starts[number]
            piece = self._parts[number][within : within + end - start]
            yield piece
            start += piece.nbytes
            number += 1

    def result(self) -> Any:
        """Return the state. Call it once, when every chunk is written and verified."""
        values: dict[int, Any] = {}
        dtensors: dict[int, DTensor] = {}

        def deliver(index: int, target: Any, path: str) -> Any:
            entry = self._content.tensors[index]
            if index not in values:
                values[index] = self._value(entry)
            local = _local(entry, target, path)
            if local is None:
                if entry.sharding is None:
                    return values[index]
                if index not in dtensors:
                    dtensors[index] = to_dtensor(values[index], entry.sharding, self._meshes[index])
                return dtensors[index]
            if not _same_memory(local, values[index]):
                if isinstance(local, torch.Tensor):
                    copy_elements(local, values[index])
                else:
                    local[...] = values[index]
            return target

        def deliver_shard(sharding: Sharding, local: Any, target: Any, path: str) -> Any:
            mesh = self._finder.find(sharding, tuple(local.shape), path) if target is None else target.device_mesh
            return to_dtensor(local, sharding, mesh)

        with torch.no_grad():
            state = build_value(self._content.tree, self._into, "state", deliver, deliver_shard)
        for target in self._in_place.values():
            if isinstance(target, torch.Tensor) and not target.is_inference():
                torch.autograd.graph.increment_version(target)  # a backward pass in progress then fails
        return state

    def _choose(self, targets: list[list[Any]]) -> dict[int, Any]:
        """Return the tensors and arrays to receive into, by region. No two of them share memory."""
        owners = Counter(entry.region for entry in self._content.tensors)
        candidates = []
        for entry, choices in zip(self._content.tensors, targets, strict=True):
            length = self._content.regions[entry.region]
            if owners[entry.region] == 1 and length == math.prod(entry.shape) * entry.itemsize > 0:
                fitting = next(
                    (target for target in choices if target is not None and _has_layout(entry, target)), None
                )
                if fitting is not None:
                    candidates.append((_address(fitting), length, entry.region, fitting))
        chosen: dict[int, Any] = {}
        free_from = 0
        for address, length, region, target in sorted(candidates, key=lambda one: one[:3]):
            if address >= free_from:
                chosen[region] = target
                free_from = address + length
        return chosen

    def _memory(self, region: int) -> memoryview:
        target = self._in_place.get(region)
        if target is None:
            return self.fresh[region].numpy().data
        if isinstance(target, np.ndarray):
            return target.reshape(-1).view(np.uint8).data
        flat: memoryview = target.detach().as_strided((target.numel(),), (1,)).view(torch.uint8).numpy().data
        return flat

    def _value(self, entry: TensorEntry) -> Any:
        if entry.region in self._in_place:
            return self._in_place[entry.region]
        fresh = self.fresh[entry.region]
        size = math.prod(entry.shape) * entry.itemsize
        if entry.dtype == BYTES:
            return fresh.numpy()[:size].tobytes()
        if entry.dtype.startswith(NUMPY):
            return fresh.numpy()[:size].view(numpy_dtype(entry.dtype.removeprefix(NUMPY))).reshape(entry.shape)
        extent = len(fresh) - len(fresh) % entry.itemsize
        tensor = fresh[:extent].view(TORCH_DTYPES[entry.dtype])
        offset = entry.offset // entry.itemsize
        if entry.strides is None:
            return tensor[offset : offset + math.prod(entry.shape)].view(entry.shape)
        return tensor.as_strided(entry.shape, entry.strides, offset)


def _local(entry: TensorEntry, target: Any, path: str) -> Any:
    """Return the local tensor or array of ``target`` if ``entry`` can be copied into it, else None."""
    if entry.sharding is not None:
        if is_absent(target):
            return None
        target = shard_here(entry.sharding, target, path)
    elif is_dtensor(target):
        return None
    if isinstance(target, torch.Tensor):
        alike = target.dtype is TORCH_DTYPES.get(entry.dtype) and tuple(target.shape) == entry.shape
        writable = target.layout is torch.strided and not target.is_meta and not may_overlap_itself(target)
        return target.detach() if alike and writable and not is_wrapper(target) else None
    if type(target) is np.ndarray and entry.dtype == NUMPY + target.dtype.str and target.flags.writeable:
        return target if target.shape == entry.shape else None
    return None


def _has_layout(entry: TensorEntry, target: Any) -> bool:
    """Return whether ``target`` is in CPU memory, with its elements in the order of the pack."""
    if isinstance(target, np.ndarray):
        return bool(target.flags.c_contiguous)
    if target.device.type != "cpu" or target.is_conj() or target.is_neg():
        return False
    return bool(target.is_contiguous() if entry.strides is None else target.stride() == entry.strides)


def _address(value: Any) -> int:
    return int(value.ctypes.data) if isinstance(value, np.ndarray) else int(value.data_ptr())


def _same_memory(one: Any, other: Any) -> bool:
    return type(one) is type(other) and _address(one) == _address(other) and _strides(one) == _strides(other)


def _strides(value: Any) -> Any:
    return value.strides if isinstance(value, np.ndarray) else value.stride()


def _check_room(needed: int) -> None:
    """Raise ManifestError if ``needed`` bytes are not available; warn if they may not be for all ranks of this host."""
    available, ranks = available_bytes(), ranks_of_host()
    if needed > available:
        raise ManifestError(f"not enough memory: the state needs {needed} bytes, {available} are available")
    if needed * ranks > available:  # no error: other ranks may need less
        log.warning(
            "too little memory, if each rank of this host receives as much",
            ranks=ranks,
            needed_bytes=needed,
            available_bytes=available,
        )
