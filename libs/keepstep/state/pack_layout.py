"""Description of a state: its structure, its memory layout, and the bytes to copy into a pack."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import astuple, dataclass, field
from typing import Any, TypeAlias

import numpy as np
import torch

from keepstep.state.device_copies import device_copies
from keepstep.state.errors import UnsupportedValue
from keepstep.state.values.leaves import TORCH_DTYPE_NAMES, encode_leaf, numpy_dtype_name
from keepstep.state.values.quantized_tensors import quantized_parts
from keepstep.state.values.sharding import LocalShard, is_dtensor, sharding_of
from keepstep.state.values.tensor_subclasses import PLAIN_TENSORS, Wrapped, is_wrapper, plain, refusal
from keepstep.state.values.typed_values import typed_parts
from keepstep_mesh.protocol.state_content import BYTES, MAX_DEPTH, NUMPY, Content, Sharding, TensorEntry

INLINE_BYTES = 4096
"""Longer bytes objects are stored in the pack instead of the manifest."""

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
_PLAIN_LEAVES = (type(None), bool, int, float, str, bytes)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""A dtype for each item size, to copy elements bit by bit."""
_SHARED_ALIGNMENT = 16
"""Keeps the elements of every dtype aligned in a region that begins in the middle of a storage."""


@dataclass(frozen=True)
class PackLayout:
    """The structure of a state, and references to its bytes."""

    content: Content
    sources: list[torch.Tensor | Array]
    """The bytes of each region, in the memory of the state."""
    shared: frozenset[int] = frozenset()
    """Regions of several tensors."""

    def copy_into(self, pack: torch.Tensor, there: frozenset[int] = frozenset()) -> None:
        """Copy every region to its position in ``pack``, and fill the gaps with zeros.

        CUDA tensors are copied after the work that the current stream of their device has now. Returns when all copies
        are complete.

        Args:
            pack: uint8 tensor on the CPU, as long as the pack.
            there: regions that ``pack`` holds already.
        """
        flat: Array = pack.numpy()
        end = 0
        with device_copies() as copy_from_device:
            for region, (source, length, position) in enumerate(
                zip(self.sources, self.content.regions, self.content.positions()[:-1], strict=True)
            ):
                if position > end:
                    flat[end:position] = 0
                end = position + length
                if region in there:
                    continue
                if not isinstance(source, torch.Tensor):
                    flat[position:end] = source
                elif source.is_cuda:
                    copy_from_device(pack[position:end], source)
                else:
                    pack[position:end].view(source.dtype).view(source.shape).copy_(source)


def describe(state: Any, *, by_value: bool = False) -> PackLayout:
    """Describe ``state`` without copying its tensors.

    Args:
        by_value: describe equal states alike: sort the keys of dicts, and ignore how tensors lie in memory and which
            of them share it. For comparisons: a state that is restored from the description has other dicts.

    Raises:
        UnsupportedValue: the state has a value that cannot be stored; the error names its path.
    """
    with torch.no_grad():
        walk = _Walk(by_value)
        tree = walk.node(state, "state", 0)
        return walk.layout(tree)


@dataclass
class _Found:
    """A tensor of the state, before it has a position in the pack."""

    tensor: torch.Tensor
    sharding: Sharding | None

    def entry(self, region: int, offset: int, strides: tuple[int, ...] | None) -> TensorEntry:
        """Return the entry of the tensor. ``strides`` None: the copy is contiguous."""
        if self.tensor.is_contiguous():
            strides = None
        dtype = TORCH_DTYPE_NAMES[self.tensor.dtype]
        return TensorEntry(dtype, tuple(self.tensor.shape), strides, region, offset, self.sharding)


@dataclass
class _Walk:
    by_value: bool
    found: list[_Found | Array | bytes] = field(default_factory=list)
    seen: dict[Any, int] = field(default_factory=dict)
    parents: set[int] = field(default_factory=set)

    def node(self, value: Any, path: str, depth: int) -> Any:
        kind = type(value)
        if kind is LocalShard or (kind in PLAIN_TENSORS and not value.is_quantized):
            return ["tensor", self._tensor(value, path)]
        if kind is np.ndarray:
            return ["tensor", self._array(value, path)]
        if kind is bytes and len(value) > INLINE_BYTES:
            return ["tensor", self._add(value)]
        if kind in _PLAIN_LEAVES:
            return encode_leaf(value, path)
        if depth == MAX_DEPTH:
            raise UnsupportedValue(f"{path} is nested more than {MAX_DEPTH} deep")
        if id(value) in self.parents:
            raise UnsupportedValue(f"{path} contains itself")
        self.parents.add(id(value))
        try:
            if kind in (dict, OrderedDict, list, tuple, set, frozenset):
                return self._container(value, path, depth + 1)
            if kind is Wrapped or isinstance(value, torch.Tensor):
                return self._special_tensor(value, path, depth + 1)
            if (typed := typed_parts(value, path)) is not None:
                return [*typed[0], *(self.node(one, path, depth + 1) for one in typed[1])]
            return encode_leaf(value, path)
        finally:
            self.parents.discard(id(value))

    def _special_tensor(self, value: Any, path: str, depth: int) -> Any:
        """Return the node of a tensor that is more than its elements."""
        if is_dtensor(value):
            local = value.to_local()
            if not is_wrapper(local):
                return ["tensor", self._tensor(value, path)]
            shape, offset, mesh, names, placements = astuple(sharding_of(value))
            node = self.node(local, path, depth)
            return ["shard", shape, offset, mesh, ["names", *names], ["names", *placements], node]
        if is_wrapper(value):
            value = Wrapped.of(value)
        if isinstance(value, Wrapped):
            stride = () if self.by_value else value.stride
            node = ["wrapped", value.name, value.size, stride, self.node(value.context, f"{path} context", depth)]
            for name, inner in value.inner.items():
                node += (name, self.node(inner, f"{path}.{name}", depth))
            return node
        if value.is_quantized:
            return ["quantized", *(self.node(one, path, depth) for one in quantized_parts(value, path))]
        return ["tensor", self._tensor(value, path)]

    def _container(self, value: Any, path: str, depth: int) -> Any:
        if isinstance(value, dict):
            node: list[Any] = ["dict"]
            if type(value) is OrderedDict:
                node = ["odict", self.node(getattr(value, "_metadata", None), f"{path}._metadata", depth)]
            items = []
            for key, item in value.items():
                where = f"{path}[{key!r}]"
                items.append((self._key(key, f"key of {where}", depth), where, item))
            if self.by_value:
                items.sort(key=lambda one: repr(one[0]))
            for key, where, item in items:
                node += (key, self.node(item, where, depth))
            return node
        if isinstance(value, (set, frozenset)):
            items = [self._key(item, f"an element of {path}", depth) for item in value]
            return [type(value).__name__, *sorted(items, key=repr)]
        return [type(value).__name__, *(self.node(item, f"{path}[{index}]", depth) for index, item in enumerate(value))]

    def _key(self, key: Any, path: str, depth: int) -> Any:
        if type(key) is tuple:
            return ["tuple", *(self._key(item, path, depth) for item in key)]
        if type(key) not in _PLAIN_LEAVES and typed_parts(key, path) is not None:
            return self.node(key, path, depth)
        return encode_leaf(key, path)

    def _add(self, value: _Found | Array | bytes, identity: Any = None) -> int:
        self.found.append(value)
        if identity is not None:
            self.seen[identity] = len(self.found) - 1
        return len(self.found) - 1

    def _array(self, value: Array, path: str) -> int:
        numpy_dtype_name(value.dtype, path)
        return self._add(value)

    def _tensor(self, value: torch.Tensor | LocalShard, path: str) -> int:
        sharding = None
        if isinstance(value, LocalShard):
            sharding = value.sharding
            value = value.tensor
        elif is_dtensor(value):
            sharding = sharding_of(value)
            value = value.to_local()
        tensor = plain(value, path)
        if tensor.layout is not torch.strided or tensor.dtype not in TORCH_DTYPE_NAMES or tensor.is_meta:
            raise refusal(tensor, path)
        if tensor.device.type not in ("cpu", "cuda"):
            raise UnsupportedValue(f"{path} is on {tensor.device}: move it to the CPU first")
        tensor = tensor.resolve_conj().resolve_neg()
        try:
            identity = (
                tensor.untyped_storage().data_ptr(),
                tensor.device,
                tensor.dtype,
                tensor.storage_offset(),
                tensor.shape,
                tensor.stride(),
                sharding,
            )
        except RuntimeError as error:  # a nested tensor, whose layout is strided, has no shape
            raise refusal(tensor, path) from error
        if tensor.numel() and identity in self.seen and not self.by_value:
            return self.seen[identity]
        return self._add(_Found(tensor, sharding), identity)

    def layout(self, tree: Any) -> PackLayout:
        """Assign a region to every tensor, in the order of the state."""
        shared = {} if self.by_value else self._shared_memory()
        entries: dict[int, TensorEntry] = {}
        lengths: list[int] = []
        sources: list[torch.Tensor | Array] = []
        together: set[int] = set()
        for index, value in enumerate(self.found):
            if index in entries:
                continue
            region = len(lengths)
            if isinstance(value, bytes):
                source: torch.Tensor | Array = np.frombuffer(value, np.uint8)
                entries[index] = TensorEntry(BYTES, (len(value),), None, region, 0)
            elif isinstance(value, np.ndarray):
                source = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
                entries[index] = TensorEntry(NUMPY + value.dtype.str, value.shape, None, region, 0)
            elif index in shared:
                source, start, members = shared[index]
                together.add(region)
                for member, found in members:
                    offset = int(found.tensor.storage_offset()) * found.tensor.itemsize - start
                    entries[member] = found.entry(region, offset, found.tensor.stride())
            else:
                dense = not self.by_value and _is_dense(value.tensor)
                entries[index] = value.entry(region, 0, value.tensor.stride() if dense else None)
                source = value.tensor.view(_BITS[value.tensor.itemsize]) if value.tensor.numel() else torch.empty(0)
                if dense or value.tensor.is_contiguous():
                    source = source.as_strided((source.numel(),), (1,))
            lengths.append(source.nbytes)
            sources.append(source)
        content = Content(tree, tuple([entries[index] for index in range(len(entries))]), tuple(lengths))
        return PackLayout(content, sources, frozenset(together))

    def _shared_memory(self) -> dict[int, tuple[torch.Tensor, int, list[tuple[int, _Found]]]]:
        """Group tensors that overlap in memory. Each group shares one region, so that its bytes are stored once.

        Returns:
            By index of a tensor: the bytes of its group, their position in the storage, and the tensors of the group.
        """
        storages: dict[Any, list[tuple[int, _Found]]] = {}
        for index, value in enumerate(self.found):
            if isinstance(value, _Found) and value.tensor.numel() and not may_overlap_itself(value.tensor):
                key = (value.tensor.untyped_storage().data_ptr(), value.tensor.device)
                storages.setdefault(key, []).append((index, value))
        shared: dict[int, tuple[torch.Tensor, int, list[tuple[int, _Found]]]] = {}
        for users in storages.values():
            for group in _overlapping(users):
                start = group[0][0] // _SHARED_ALIGNMENT * _SHARED_ALIGNMENT
                end = max(span[1] for span in group)
                storage = max((span[3].tensor.untyped_storage() for span in group), key=len)
                whole = torch.empty(0, dtype=torch.uint8, device=group[0][3].tensor.device)
                whole.set_(storage, start, (end - start,), (1,))
                members = [(index, found) for _, _, index, found in group]
                shared.update((index, (whole, start, members)) for index, _ in members)
        return shared


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the positions in the storage of the first byte of the tensor, and of the byte after its last."""
    start = int(tensor.storage_offset())
    end = start + 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start * tensor.itemsize, end * tensor.itemsize


def _overlapping(users: list[tuple[int, _Found]]) -> Iterator[list[tuple[int, int, int, _Found]]]:
    """Yield the groups of two or more ``users`` of a storage that overlap, as (first byte, end, index, tensor)."""
    if len(users) == 1:
        return
    spans = sorted([(*_extent(found.tensor), index, found) for index, found in users], key=lambda span: span[:3])
    group, end = spans[:1], spans[0][1]
    for span in spans[1:]:
        if span[0] >= end:
            if len(group) > 1:
                yield group
            group = []
        group.append(span)
        end = max(end, span[1])
    if len(group) > 1:
        yield group


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements lie in memory without gap or overlap, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def may_overlap_itself(tensor: torch.Tensor) -> bool:
    """Return whether two elements may share memory."""
    if tensor.is_contiguous():
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False
