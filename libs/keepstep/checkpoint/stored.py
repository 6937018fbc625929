"""A committed checkpoint as its keys: tensors with their shards, values that are not tensors, and where they lie.

``CheckpointReader`` has the bytes, at a relay or in a directory. ``StoredCheckpoint`` has their meaning. It also reads
a state that was stored without ``keepstep.checkpoint``, such as a live state: its tree is flattened to keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from keepstep.checkpoint.reading import Wanted
from keepstep.state.errors import CheckpointError, StateMismatch
from keepstep.state.flattening import Index, Leaf, Path, build, key_of, pack_path, unpack_path
from keepstep.state.restoring import build_value
from keepstep.state.state_manifest import read_manifest
from keepstep.state.values.leaves import TORCH_DTYPES, numpy_dtype
from keepstep.state.values.tensor_subclasses import PLAIN_TENSORS
from keepstep_mesh.errors import ManifestError
from keepstep_mesh.protocol.boxes import Box, Sizes, uncovered, whole
from keepstep_mesh.protocol.state_content import BYTES, NUMPY, PARTS, TensorEntry, plain_container

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

FORMAT = "keepstep-checkpoint-1"
"""Marks the tree of a manifest that ``keepstep.checkpoint`` wrote. docs/checkpoint-format.md describes it."""
MAX_READ_BYTES = 32 << 20
"""A larger part of a tensor is read in pieces of at most this size, or of one index of its outer dimension."""


class CheckpointReader(Protocol):
    """The bytes of one committed checkpoint. Safe to use from several threads."""

    def manifests(self) -> list[bytes]:
        """Return the manifest of each rank, in order.

        Raises:
            CheckpointNotFound: the checkpoint does not exist, or is not committed.
        """

    def read(self, rank: int, offset: int, length: int) -> memoryview:
        """Return ``length`` bytes of the pack of ``rank`` from ``offset``. Reads no other parts of its chunks.

        Raises:
            CheckpointDamaged: a chunk differs from its digests; the error names it and its file.
        """

    def read_all(self, wanted: Sequence[Wanted]) -> None:
        """Read all that is wanted, on several threads. Reads no part of a chunk twice.

        Raises:
            CheckpointDamaged: a chunk differs from its digests; the error names it, its file, and the key.
        """

    def close(self) -> None:
        """Release connections and files."""


@dataclass(frozen=True)
class StoredShard:
    """A part of a tensor, in the pack of one rank."""

    rank: int
    box: Box
    entry: TensorEntry
    position: int
    """Of its first element in the pack, in bytes."""


@dataclass
class StoredTensor:
    """A tensor. Its shards do not overlap, and cover it."""

    dtype: torch.dtype
    shape: Sizes
    by_box: dict[Box, StoredShard] = field(default_factory=dict)

    @property
    def shards(self) -> list[StoredShard]:
        """Its shards. If several ranks stored one, that of the lowest rank."""
        return list(self.by_box.values())

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} tensor of shape {self.shape}"


@dataclass(frozen=True)
class StoredObject:
    """A value that is not a tensor. It may contain tensors."""

    rank: int
    node: Any
    """In the tree of the manifest of ``rank``."""


class StoredCheckpoint:
    """The keys of one committed checkpoint.

    Args:
        reader: its bytes.

    Attributes:
        reader: its bytes.
        tensors: the tensors, by key.
        objects: all other values, by key. ``value`` returns one.
        paths: the path of each key in the nested state that was saved.

    Raises:
        CheckpointNotFound: the checkpoint does not exist, or is not committed.
        CheckpointError: the manifests contradict each other.
        ManifestError: the tree of a manifest is damaged.
    """

    def __init__(self, reader: CheckpointReader) -> None:
        self.reader = reader
        self.tensors: dict[str, StoredTensor] = {}
        self.objects: dict[str, StoredObject] = {}
        self.paths: dict[str, Path] = {}
        self._contents = []
        for rank, data in enumerate(reader.manifests()):
            manifest = read_manifest(data)
            self._contents.append((manifest.content.tensors, manifest.content.positions()))
            self._add(rank, manifest.content.tree)
        for key, tensor in self.tensors.items():
            if key in self.objects:
                raise CheckpointError(
                    f"{key} is a tensor at one rank and another value at rank {self.objects[key].rank}"
                )
            if problem := uncovered(tensor.shape, list(tensor.by_box)):
                raise CheckpointError(f"{key} is incomplete in this checkpoint: {problem}")
        for key in self.keys():
            self.paths.setdefault(key, (key,))

    def keys(self) -> tuple[str, ...]:
        """Return all keys, tensors first."""
        return (*self.tensors, *self.objects)

    # ---- manifests

    def _add(self, rank: int, tree: Any) -> None:
        top = _pairs(tree, f"the tree of rank {rank}")
        if top.get("format") != FORMAT:
            self._add_natural(rank, tree, ())
            return
        for key, node in _section(top, "tensors", rank).items():
            shards = node[1:] if type(node) is list and node[:1] == ["list"] else [node]
            if not shards:
                raise ManifestError(f"tensor {key} has no shard")
            for one in shards:
                self._add_shard(rank, key, one)
        for key, node in _section(top, "objects", rank).items():
            self.objects.setdefault(key, StoredObject(rank, node))
        for key, node in _section(top, "paths", rank).items():
            packed = build_value(node, None, f"path of {key}", _no_tensor)
            if type(packed) is not tuple or not packed:
                raise ManifestError(f"path of {key} is a {type(packed).__name__}, expected a tuple of its keys")
            self.paths.setdefault(key, unpack_path(packed))

    def _add_natural(self, rank: int, node: Any, path: Path) -> None:
        """Add the leaves of the tree of any state, with the keys of ``flatten``."""
        node = plain_container(node)
        kind = node[0] if type(node) is list and node else None
        if kind in ("dict", "odict") and (len(node) > (1 if kind == "dict" else 2) or not path):
            for key, item in _pairs(node, key_of(path)).items():
                self._add_natural(rank, item, (*path, key))
            return
        if kind == "list" and any(_is_part(item) for item in node[1:]):
            for number, item in enumerate(node[1:]):
                self._add_natural(rank, item, (*path, Index(number)))
            return
        key = key_of(path)
        self.paths.setdefault(key, path)
        if kind == "tensor" and self._contents[rank][0][node[1]].dtype in TORCH_DTYPES:
            self._add_shard(rank, key, node)
        else:
            self.objects.setdefault(key, StoredObject(rank, node))

    def _add_shard(self, rank: int, key: str, node: Any) -> None:
        entry, position = self._entry(rank, node)
        if entry.dtype not in TORCH_DTYPES:
            raise ManifestError(f"{key} has dtype {entry.dtype}: expected a tensor")
        shape = entry.shape if entry.sharding is None else entry.sharding.global_shape
        box = whole(shape) if entry.sharding is None else Box(entry.sharding.global_offset, entry.shape)
        tensor = self.tensors.setdefault(key, StoredTensor(TORCH_DTYPES[entry.dtype], shape))
        if (tensor.dtype, tensor.shape) != (TORCH_DTYPES[entry.dtype], shape) or len(box.offset) != len(shape):
            raise CheckpointError(
                f"{key} is a {tensor} at one rank, and a {entry.dtype} tensor of shape {shape} at rank {rank}"
            )
        tensor.by_box.setdefault(box, StoredShard(rank, box, entry, position))

    def _entry(self, rank: int, node: Any) -> tuple[TensorEntry, int]:
        entries, positions = self._contents[rank]
        if type(node) is not list or node[:1] != ["tensor"]:
            raise ManifestError("expected a tensor in the tree")
        entry = entries[node[1]]
        return entry, positions[entry.region] + entry.offset

    # ---- values

    def value(self, key: str, into: Any = None) -> Any:
        """Return a value that is not a tensor, by its key.

        Args:
            key: of the value.
            into: value of the receiver. Tensors of it that fit are loaded in place.

        Raises:
            CheckpointError: its class is not known in this process.
        """
        stored = self.objects[key]

        def deliver(index: int, target: Any, _path: str) -> Any:
            entry, position = self._entry(stored.rank, ["tensor", index])
            data = self.reader.read(stored.rank, position, math.prod(entry.shape) * entry.itemsize)
            if entry.dtype == BYTES:
                return bytes(data)
            if entry.dtype.startswith(NUMPY):
                array = np.empty(entry.shape, numpy_dtype(entry.dtype.removeprefix(NUMPY)))
                array.reshape(-1).view(np.uint8)[:] = data
                return array
            shape, dtype = entry.shape, TORCH_DTYPES[entry.dtype]
            is_here = type(target) in PLAIN_TENSORS and target.dtype is dtype and tuple(target.shape) == shape
            tensor = target.detach() if is_here else torch.empty(shape, dtype=dtype)
            self._read_shard(StoredShard(stored.rank, whole(shape), entry, position), whole(shape), tensor)
            return target if is_here else tensor

        try:
            return build_value(stored.node, into, key, deliver)
        except StateMismatch as error:
            raise CheckpointError(str(error)) from error

    def tensor(self, key: str) -> torch.Tensor:
        """Return a whole tensor, in new memory of the CPU."""
        stored = self.tensors[key]
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        for shard in stored.shards:
            self._read_shard(shard, shard.box, tensor[shard.box.within(whole(stored.shape))])
        return tensor

    def _read_shard(self, shard: StoredShard, box: Box, target: torch.Tensor) -> None:
        for piece in pieces_of(shard, box):
            piece.copy(self.reader, target)

    def state_dict(self) -> dict[Any, Any]:
        """Return the whole state, nested as it was saved, with whole tensors in new memory of the CPU."""
        values = {key: self.tensor(key) if key in self.tensors else self.value(key) for key in self.keys()}
        return build({key: Leaf(self.paths[key], value) for key, value in values.items()})

    def metadata(self) -> Metadata:
        """Return the ``Metadata`` of torch.distributed.checkpoint. ``planner_data`` has the paths."""
        from torch.distributed.checkpoint import metadata  # noqa: PLC0415  # slow import

        found: dict[str, Any] = {key: metadata.BytesStorageMetadata() for key in self.objects}
        for key, tensor in self.tensors.items():
            chunks = [
                metadata.ChunkStorageMetadata(torch.Size(shard.box.offset), torch.Size(shard.box.shape))
                for shard in tensor.shards
            ]
            properties = metadata.TensorProperties(dtype=tensor.dtype)
            found[key] = metadata.TensorStorageMetadata(properties, torch.Size(tensor.shape), chunks)
        paths = {
            key: tuple(step.number if isinstance(step, Index) else str(step) for step in path)
            for key, path in self.paths.items()
        }
        return metadata.Metadata(found, planner_data=paths)


def stored_state(tensors: Mapping[str, Any], objects: Mapping[str, Any], paths: Mapping[str, Path]) -> dict[str, Any]:
    """Return the state of one rank as its manifest has it."""
    packed = {key: pack_path(path) for key, path in paths.items() if path != (key,)}
    return {"format": FORMAT, "tensors": dict(tensors), "objects": dict(objects), "paths": packed}


# ---- reading parts of shards


@dataclass(frozen=True)
class Piece:
    """Bytes of one shard that are read at once, and where they belong."""

    shard: StoredShard
    offset: int
    """In the pack."""
    nbytes: int
    shape: Sizes
    strides: Sizes
    target: tuple[slice, ...]
    """In the tensor that receives the box."""

    def copy(self, reader: CheckpointReader, target: torch.Tensor) -> None:
        """Read the bytes, and copy them into their part of ``target``, which receives the whole box."""
        self.put(reader.read(self.shard.rank, self.offset, self.nbytes), target)

    def put(self, data: memoryview, target: torch.Tensor) -> None:
        """Copy the bytes, which were read, into their part of ``target``."""
        flat = torch.frombuffer(bytearray(data) if data.readonly else data, dtype=torch.uint8)
        stored = flat.view(TORCH_DTYPES[self.shard.entry.dtype]).as_strided(self.shape, self.strides)
        with torch.no_grad():
            target[self.target].copy_(stored)

    def memory_in(self, target: torch.Tensor) -> memoryview | None:
        """Return the memory of its part of ``target``. None: it is elsewhere or otherwise than the stored bytes."""
        part, entry = target[self.target], self.shard.entry
        is_dense = math.prod(self.shape) * entry.itemsize == self.nbytes
        if not is_dense or part.device.type != "cpu" or part.dtype is not TORCH_DTYPES[entry.dtype]:
            return None
        strides = zip(self.shape, self.strides, part.stride(), strict=True)
        if part.is_conj() or part.is_neg() or any(size > 1 and one != other for size, one, other in strides):
            return None
        flat = part.detach().as_strided((math.prod(self.shape),), (1,)).view(torch.uint8)
        memory: memoryview = flat.numpy().data
        return memory


def pieces_of(shard: StoredShard, box: Box) -> Iterator[Piece]:
    """Yield the pieces of ``box``, which lies in the shard."""
    if box.volume:
        strides = shard.entry.strides or _contiguous(shard.box.shape)
        start = [one.start for one in box.within(shard.box)]
        yield from _split(shard, start, list(box.shape), strides, [slice(0, size) for size in box.shape])


def _split(
    shard: StoredShard, start: list[int], sizes: list[int], strides: Sizes, target: list[slice]
) -> Iterator[Piece]:
    itemsize = shard.entry.itemsize
    nbytes = (1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))) * itemsize
    outer = max((n for n, size in enumerate(sizes) if size > 1), key=lambda n: strides[n], default=None)
    if nbytes <= MAX_READ_BYTES or outer is None:
        first = sum(at * stride for at, stride in zip(start, strides, strict=True))
        yield Piece(shard, shard.position + first * itemsize, nbytes, tuple(sizes), strides, tuple(target))
        return
    step = max(1, min(sizes[outer] - 1, MAX_READ_BYTES // (strides[outer] * itemsize)))
    for at in range(0, sizes[outer], step):
        size = min(step, sizes[outer] - at)
        begin, part, where = list(start), list(sizes), list(target)
        begin[outer] += at
        part[outer] = size
        where[outer] = slice(target[outer].start + at, target[outer].start + at + size)
        yield from _split(shard, begin, part, strides, where)


def _contiguous(shape: Sizes) -> Sizes:
    strides, step = [0] * len(shape), 1
    for dimension in reversed(range(len(shape))):
        strides[dimension] = step
        step *= max(shape[dimension], 1)
    return tuple(strides)


# ---- nodes of a tree


def _section(top: dict[Any, Any], name: str, rank: int) -> dict[str, Any]:
    """Return the items of a dict that every tree of ``FORMAT`` has, by key."""
    node = top.get(name)
    if type(node) is not list or node[:1] != ["dict"]:
        raise ManifestError(f"the tree of rank {rank} has no dict of {name}: the manifest is damaged, save it again")
    found = _pairs(node, f"{name} of rank {rank}")
    for key in found:
        if type(key) is not str:
            raise ManifestError(f"{name} of rank {rank} has the key {str(key)[:100]!r}, expected a string")
    return found


def _pairs(node: Any, what: str) -> dict[Any, Any]:
    """Return the items of a dict node, with decoded keys."""
    if type(node) is not list or node[:1] not in (["dict"], ["odict"]):
        return {}
    pairs = node[1:] if node[0] == "dict" else node[2:]
    if len(pairs) % 2:
        raise ManifestError(f"{what} has a key without a value")
    try:
        keys = [build_value(key, None, f"key of {what}", _no_tensor) for key in pairs[::2]]
        return dict(zip(keys, pairs[1::2], strict=True))
    except TypeError as error:
        raise ManifestError(f"{what} has a key that cannot be one: {error}") from error
    except StateMismatch as error:
        raise CheckpointError(str(error)) from error


def _is_part(node: Any) -> bool:
    if type(node) is not list or not node:
        return False
    node = plain_container(node)
    kind = node[0] if type(node[0]) is str else None
    return kind in PARTS or (kind == "list" and any(_is_part(one) for one in node[1:]))


def _no_tensor(_index: int, _target: Any, path: str) -> Any:
    raise ManifestError(f"{path} has a tensor where none is expected")
