"""Restoring a state from a manifest and its pack, into existing tensors where they fit."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from keepstep.runtime.host_memory import available_bytes, ranks_of_host
from keepstep.state.errors import StateMismatch
from keepstep.state.pack_layout import may_overlap_itself
from keepstep.state.values.known_classes import class_name, find_class
from keepstep.state.values.leaves import TORCH_DTYPES, decode_leaf, numpy_dtype
from keepstep.state.values.quantized_tensors import quantized_tensor
from keepstep.state.values.sharding import MeshFinder, is_dtensor, sharding_of, to_dtensor
from keepstep.state.values.tensor_subclasses import Wrapped, is_wrapper
from keepstep.state.values.typed_values import TYPED, build_typed
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import ManifestError
from keepstep_mesh.protocol.manifest import ALIGNMENT, CHUNK_BYTES, glimpse
from keepstep_mesh.protocol.state_content import BYTES, NUMPY, Content, Sharding, TensorEntry, read_sharding

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

log = get_logger("keepstep.state")

_ABSENT = object()

Spare = Mapping[int, torch.Tensor]
"""Memory of an earlier ``Destination``, by region."""


class Destination:
    """Memory for the pack of ``content``: the tensors of ``into`` that fit, and new memory for all other regions.

    A DTensor without a counterpart in ``into`` is built on the device mesh of this process that fits it. If several
    fit, it is the mesh of the DTensors in ``into`` that are sharded alike: an optimizer's state is, as its parameter.

    Args:
        content: structure of the state.
        into: state to receive into. Default: all memory is new.
        spare: memory to reuse where it fits. Its content is kept: it may have chunks of an earlier transfer.

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
                if _is_absent(target):
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
        for region, size in wanted.items():
            if region not in self.fresh:
                self.fresh[region] = torch.empty(size, dtype=torch.uint8)
        self._parts: list[memoryview] = []
        self._starts: list[int] = []
        self.pack_bytes = 0
        gap = memoryview(bytearray(ALIGNMENT))
        for region, position in enumerate(content.positions()[:-1]):
            self._append(gap[: position - self.pack_bytes])
            self._append(self._memory(region))

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
                    local.copy_(values[index])
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


def _is_absent(target: Any) -> bool:
    """Return whether ``into`` has no counterpart. None is absent too: optimizers have it before their first step."""
    return target is _ABSENT or target is None


def _local(entry: TensorEntry, target: Any, path: str) -> Any:
    """Return the local tensor or array of ``target`` if ``entry`` can be copied into it, else None."""
    if entry.sharding is not None:
        if _is_absent(target):
            return None
        target = _shard_here(entry.sharding, target, path)
    elif is_dtensor(target):
        return None
    if isinstance(target, torch.Tensor):
        alike = target.dtype is TORCH_DTYPES.get(entry.dtype) and tuple(target.shape) == entry.shape
        writable = target.layout is torch.strided and not target.is_meta and not may_overlap_itself(target)
        return target.detach() if alike and writable and not is_wrapper(target) else None
    if type(target) is np.ndarray and entry.dtype == NUMPY + target.dtype.str and target.flags.writeable:
        return target if target.shape == entry.shape else None
    return None


def _shard_here(sharding: Sharding, target: Any, path: str) -> torch.Tensor:
    """Return the shard of ``target``. Raises ``StateMismatch`` if it is not a DTensor that is sharded alike."""
    if not is_dtensor(target):
        raise StateMismatch(
            f"{path} is one shard of a DTensor at the source, but {type(target).__name__} here: pass `into` with a "
            f"DTensor sharded as {sharding}"
        )
    if sharding_of(target) != sharding:
        raise StateMismatch(f"{path} is sharded as {sharding_of(target)} here but as {sharding} at the source")
    return target.to_local()


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


Deliver = Callable[[int, Any, str], Any]
"""Returns a tensor by its index, with its counterpart in ``into`` and its path. None: targets are looked for."""
DeliverShard = Callable[[Sharding, Any, Any, str], Any]
"""Returns the DTensor of a shard that is a wrapper, with its counterpart in ``into`` or None, and its path."""


def _no_shard(_sharding: Sharding, _local: Any, _target: Any, path: str) -> Any:
    raise ManifestError(f"{path} is one shard of a wrapped tensor, where a whole value is expected")


def build_value(node: Any, into: Any, path: str, deliver: Deliver, deliver_shard: DeliverShard = _no_shard) -> Any:
    """Return the value of ``node``.

    Args:
        node: of a tree.
        into: its counterpart in the state of the receiver.
        path: of the value, for errors.
        deliver: returns the tensors.
        deliver_shard: returns DTensors whose shards are wrappers.

    Raises:
        ManifestError: the node is invalid.
        StateMismatch: the value does not fit this process, such as one of a class that it does not know.
    """
    return _Builder(deliver, deliver_shard).value(node, into, path)


@dataclass(frozen=True)
class _Builder:
    deliver: Deliver
    deliver_shard: DeliverShard

    def value(self, node: Any, into: Any, path: str) -> Any:
        if type(node) is not list or not node:
            return decode_leaf(node, path)
        kind = node[0]
        match kind:
            case "tensor":
                return self.deliver(node[1], into, path)
            case "list" | "tuple":
                known = into if isinstance(into, (list, tuple)) else ()
                items = [
                    self.value(item, known[index] if index < len(known) else _ABSENT, f"{path}[{index}]")
                    for index, item in enumerate(node[1:])
                ]
                return items if kind == "list" else tuple(items)
            case "dict" | "odict":
                return self._dict(node, into, path)
            case "set" | "frozenset":
                own = _by_class(into if isinstance(into, (set, frozenset)) else ())
                items = [self._key(item, own, f"an element of {path}") for item in node[1:]]
                return set(items) if kind == "set" else frozenset(items)
            case "wrapped":
                return self._wrapped(node, into, path)
            case "shard":
                return self._shard(node, into, path)
            case "quantized":
                parts = [self.value(one, None, path) for one in node[1:]]
                is_search = len(parts) > 1 and parts[1] is None
                return None if is_search else quantized_tensor(parts, path)
        if type(kind) is str and kind in TYPED:
            return build_typed(node, None if into is _ABSENT else into, path, self.value)
        return decode_leaf(node, path)

    def _dict(self, node: Any, into: Any, path: str) -> dict[Any, Any]:
        built: dict[Any, Any] = {}
        pairs = node[1:]
        if node[0] == "odict":
            built = OrderedDict()
            metadata = self.value(node[1] if len(node) > 1 else None, None, f"{path}._metadata")
            if metadata is not None:
                built._metadata = metadata  # type: ignore[attr-defined]  # noqa: SLF001  # has the versions of torch's modules
            pairs = node[2:]
        if len(pairs) % 2:
            raise ManifestError(f"{path} has a key without a value")
        known = into if isinstance(into, dict) else {}
        own = _by_class(known)
        for key_node, item in zip(pairs[::2], pairs[1::2], strict=True):
            key = self._key(key_node, own, f"key of {path}")
            if key in built:
                raise ManifestError(f"{path} has the key {key!r} twice")
            built[key] = self.value(item, known.get(key, _ABSENT), f"{path}[{key!r}]")
        return built

    def _key(self, node: Any, own: Mapping[str, Any], path: str) -> Any:
        """Return a key of a dict, or an element of a set. ``own``: keys here, by the names of their classes."""
        if type(node) is list and node and node[0] == "tuple":
            return tuple([self._key(item, own, path) for item in node[1:]])
        if type(node) is list and len(node) > 1 and type(node[0]) is str and node[0] in TYPED:
            key = build_typed(node, own.get(node[1]) if type(node[1]) is str else None, path, self.value)
            try:
                hash(key)
            except TypeError as error:
                raise ManifestError(f"{path} has no hash: {error}") from error
            return key
        return decode_leaf(node, path)

    def _wrapped(self, node: Any, into: Any, path: str) -> Any:
        """Return the wrapper, in the tensors of that of ``into`` where they fit: the same one if all do."""
        if len(node) < 5 or len(node) % 2 == 0 or not all(type(name) is str for name in node[5::2]):
            raise ManifestError(f"{path} is an invalid wrapped tensor: {glimpse(node[:5])}")
        _, name, size, stride, context = node[:5]
        if not all(type(sizes) is list and all(type(one) is int for one in sizes) for sizes in (size, stride)):
            raise ManifestError(f"{path} has an invalid shape or stride: {glimpse([size, stride])}")
        kind = find_class(name, torch.Tensor, into, path)
        own = Wrapped.of(into) if type(into) is kind and is_wrapper(into) else None
        inner_here = {} if own is None else own.inner
        built = Wrapped(
            kind,
            tuple(size),
            tuple(stride),
            self.value(context, None if own is None else own.context, f"{path} context"),
            {
                name: self.value(item, inner_here.get(name, _ABSENT), f"{path}.{name}")
                for name, item in zip(node[5::2], node[6::2], strict=True)
            },
        )
        if any(one is None for one in built.inner.values()):
            return None  # targets are looked for
        if own is not None and _same_wrapper(own, built):
            return into
        return built.build(path)

    def _shard(self, node: Any, into: Any, path: str) -> Any:
        if len(node) != 7 or not all(type(one) is list and one[:1] == ["names"] for one in node[4:6]):
            raise ManifestError(f"{path} is an invalid shard: {glimpse(node[:6])}")
        sharding = read_sharding([*node[1:4], *(one[1:] for one in node[4:6])], path)
        target = None if _is_absent(into) else into
        local = None if target is None else _shard_here(sharding, target, path)
        built = self.value(node[6], local, path)
        return target if built is not None and built is local else self.deliver_shard(sharding, built, target, path)


def _by_class(values: Iterable[Any]) -> dict[str, Any]:
    """Return one value of each class that keys of a dict, and items of those that are tuples, have."""
    found: dict[str, Any] = {}
    for one in values:
        found[class_name(type(one))] = one
        if isinstance(one, tuple):
            found |= _by_class(one)
    return found


def _same_wrapper(own: Wrapped, built: Wrapped) -> bool:
    """Return whether ``own`` has received all that ``built`` has."""
    same = own.inner.keys() == built.inner.keys() and all(built.inner[name] is one for name, one in own.inner.items())
    try:
        return bool(same and own.size == built.size and own.stride == built.stride and own.context == built.context)
    except (RuntimeError, ValueError):  # a context with tensors or arrays
        return False
