"""A committed checkpoint as its keys: tensors with their shards, values that are not tensors, and where they lie.

``CheckpointReader`` has the bytes, at a relay or in a directory. ``StoredCheckpoint`` has their meaning. It also reads
a state that was stored without ``keepstep.checkpoint``, such as a live state: its tree is flattened to keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from keepstep.checkpoint.reading import Wanted
from keepstep.state.errors import CheckpointError, StateMismatch
from keepstep.state.flattening import Leaf, build, pack_path
from keepstep.state.state_manifest import read_manifest
from keepstep.state.value_building import build_value
from keepstep.state.values.leaves import TORCH_DTYPES, copy_elements, numpy_dtype
from keepstep.state.values.tensor_subclasses import PLAIN_TENSORS
from keepstep_mesh.errors import ContradictingRanks, ManifestError
from keepstep_mesh.protocol.boxes import Box, Sizes, whole
from keepstep_mesh.protocol.state_content import BYTES, NUMPY, TensorEntry
from keepstep_mesh.protocol.stored_keys import FORMAT, Index, Path, StoredShard, TensorShards, read_keys

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

MAX_READ_BYTES = 32 << 20
"""A larger part of a tensor is read in pieces of at most this size, or of one index of its outer dimension."""


class CheckpointReader(Protocol):
    """The bytes of one committed checkpoint. Safe to use from several threads."""

    def manifests(self) -> list[bytes]:
        """Return the manifest of each rank, in order.

        Raises:
            CheckpointNotFound: the checkpoint does not exist, or is not committed.
        """

    def read(self, rank: int, offset: int, length: int, into: memoryview | None = None) -> memoryview:
        """Return ``length`` bytes of the pack of ``rank`` from ``offset``. Reads no other parts of its chunks.

        ``into`` receives them, if it is given: memory of this length.

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


class StoredTensor:
    """A tensor of a checkpoint.

    Attributes:
        dtype: of its elements.
        shape: of the whole tensor.
        shards: its shards, which do not overlap, and cover it.
    """

    def __init__(self, found: TensorShards) -> None:
        self.dtype = TORCH_DTYPES[found.dtype]
        self.shape = found.shape
        self.shards = list(found.by_box.values())

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} tensor of shape {self.shape}"


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
        contents = [read_manifest(data).content for data in reader.manifests()]
        try:
            found = read_keys(contents, _read_key)
        except (ContradictingRanks, StateMismatch) as error:
            raise CheckpointError(str(error)) from error
        self.tensors = {key: StoredTensor(one) for key, one in found.tensors.items()}
        self.objects = found.objects
        self.paths: dict[str, Path] = found.paths
        self._contents = [(one.tensors, one.positions()) for one in contents]

    def keys(self) -> tuple[str, ...]:
        """Return all keys, tensors first."""
        return (*self.tensors, *self.objects)

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
            entry, position = self._entry(stored.rank, index)
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

    def _entry(self, rank: int, index: int) -> tuple[TensorEntry, int]:
        """Return an entry of the manifest of a rank, and its position in the pack in bytes."""
        entries, positions = self._contents[rank]
        return entries[index], positions[entries[index].region] + entries[index].offset

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
        """Read the bytes into their part of ``target``, which receives the whole box.

        They are read straight into its memory where that is possible: a copy of torch runs on several threads, which
        takes 20 ms for any size while other programs use the cores.
        """
        memory = self.memory_in(target)
        data = reader.read(self.shard.rank, self.offset, self.nbytes, memory)
        if memory is None:
            self.put(data, target)

    def put(self, data: memoryview, target: torch.Tensor) -> None:
        """Copy the bytes, which were read, into their part of ``target``."""
        flat = torch.frombuffer(bytearray(data) if data.readonly else data, dtype=torch.uint8)
        stored = flat.view(TORCH_DTYPES[self.shard.entry.dtype]).as_strided(self.shape, self.strides)
        with torch.no_grad():
            copy_elements(target[self.target], stored)

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
        start = [one.start for one in box.within(shard.box)]
        yield from _split(shard, start, list(box.shape), shard.entry.steps, [slice(0, size) for size in box.shape])


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


def _read_key(node: Any, what: str) -> Any:
    return build_value(node, None, what, _no_tensor)


def _no_tensor(_index: int, _target: Any, path: str) -> Any:
    raise ManifestError(f"{path} has a tensor where none is expected")
