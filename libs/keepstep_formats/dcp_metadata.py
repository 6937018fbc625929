"""Content of a directory of torch.distributed.checkpoint: its ``.metadata``, checked.

Torch 2.0 to 2.15 write it, and Megatron Core. A directory from elsewhere is untrusted: types, sizes, positions and
file names are checked, and the shards of a tensor must cover it, before memory is allocated.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from keepstep.state.values.leaves import TORCH_DTYPES
from keepstep_formats.foreign_errors import ForeignCheckpointError
from keepstep_formats.metadata_pickle import (
    MAX_METADATA_BYTES,
    DtypeName,
    Record,
    read_metadata_pickle,
)
from keepstep_mesh.protocol.boxes import Box, Sizes, uncovered
from keepstep_mesh.protocol.stored_keys import Index
from keepstep_mesh.protocol.stored_keys import Path as LeafPath

METADATA = ".metadata"
ORIGINAL_SHAPE = "nd_reformulated_orig_global_shape"
"""Megatron Core's name for the shape of a tensor that it stored as flattened chunks, until its version 0.15."""
MAX_SIZE = 1 << 46
"""Elements along a dimension, and bytes of a file."""
MAX_DIMENSIONS = 64
MAX_GAPS = 1000
"""Positions of lists without a value in the directory, such as those of empty dicts, which DCP does not store."""


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes of one item in a file of the directory."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class ForeignTensor:
    """A tensor, and where its shards are. They cover it, and do not overlap."""

    dtype: torch.dtype
    shape: Sizes
    shards: dict[Box, ByteRange]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class DcpContent:
    """The items of a directory.

    Attributes:
        tensors: by key.
        objects: all other values, by key.
        paths: path of each key in the nested state that was saved.
        flattened: original shape of each tensor that Megatron Core stored as flattened chunks. Such a tensor has the
            shape ``[x, y, n]``: ``x * y`` chunks of ``n`` elements, which tile the original shape.
        incomplete: for each tensor whose shards do not tile it, why.
    """

    tensors: dict[str, ForeignTensor]
    objects: dict[str, ByteRange]
    paths: dict[str, LeafPath]
    flattened: dict[str, Sizes] = field(default_factory=dict)
    incomplete: dict[str, str] = field(default_factory=dict)


def read_dcp_metadata(directory: Path, *, allow_gaps: bool = False) -> DcpContent:
    """Read ``.metadata``. Runs no code from it.

    Args:
        directory: the checkpoint.
        allow_gaps: accept tensors with elements that no shard has, as Megatron Core 0.19 leaves padding out.

    Raises:
        RefusedClass: the file names a class that DCP's metadata does not have.
        ForeignCheckpointError: the file is missing, damaged, or contradicts itself.
    """
    path = directory / METADATA
    try:
        with path.open("rb") as file:
            data = file.read(MAX_METADATA_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        raise ForeignCheckpointError(
            f"{path} not found: {directory} was not written by torch.distributed.checkpoint, or its save did not finish"
        ) from None
    try:
        content = _Reading(read_metadata_pickle(data), len(data)).content()
        for key, problem in content.incomplete.items():
            if not allow_gaps:
                raise ForeignCheckpointError(f"tensor {key!r} is incomplete: {problem}")
        return content
    except ForeignCheckpointError as error:
        raise type(error)(f"{path}: {error}") from error


class _Reading:
    """Checks the records of one file."""

    def __init__(self, metadata: Any, size: int) -> None:
        self._top = _fields(metadata, "Metadata", "MCoreMetadata")
        self._left = size
        """Shards that may follow. Each takes more than a byte of the file, unless they are hostile references."""
        self._incomplete: dict[str, str] = {}

    def content(self) -> DcpContent:
        stored = self._storage()
        tensors: dict[str, ForeignTensor] = {}
        objects: dict[str, ByteRange] = {}
        for key, item in _dict(self._top.get("state_dict_metadata"), "state_dict_metadata").items():
            if type(key) is not str:
                raise ForeignCheckpointError(f"key {str(key)[:100]!r} is not a string")
            if isinstance(item, Record) and item.kind == "BytesStorageMetadata":
                objects[key] = _stored(stored, key, ())
            else:
                tensors[key] = self._tensor(key, item, stored)
        return DcpContent(
            tensors, objects, self._paths([*tensors, *objects]), self._flattened(tensors), self._incomplete
        )

    def _storage(self) -> dict[tuple[str, Sizes], ByteRange]:
        found: dict[tuple[str, Sizes], ByteRange] = {}
        for index, where in _dict(self._top.get("storage_data"), "storage_data").items():
            fields = _fields(index, "MetadataIndex")
            key, offset = fields.get("fqn"), fields.get("offset")
            if type(key) is not str:
                raise ForeignCheckpointError("an index of storage_data has no key")
            found[key, () if offset is None else _sizes(offset, key)] = _range(_fields(where, "_StorageInfo"), key)
        return found

    def _tensor(self, key: str, item: Any, stored: dict[tuple[str, Sizes], ByteRange]) -> ForeignTensor:
        fields = _fields(item, "TensorStorageMetadata")
        shape, dtype = _sizes(fields.get("size"), key), _dtype(fields.get("properties"), key)
        shards: dict[Box, ByteRange] = {}
        chunks = fields.get("chunks")
        if type(chunks) is not list:
            raise ForeignCheckpointError(f"tensor {key!r} has no list of shards")
        for chunk in chunks:
            self._left -= 1
            if self._left < 0:
                raise ForeignCheckpointError("the file lists more shards than it can describe")
            of_chunk = _fields(chunk, "ChunkStorageMetadata")
            box = Box(_sizes(of_chunk.get("offsets"), key), _sizes(of_chunk.get("sizes"), key))
            if len(box.offset) != len(shape) or len(box.shape) != len(shape):
                raise ForeignCheckpointError(f"tensor {key!r} of shape {shape} has a shard {box.offset} + {box.shape}")
            where = _stored(stored, key, box.offset)
            if where.length < box.volume * dtype.itemsize:
                raise ForeignCheckpointError(
                    f"shard {box} of {key!r} has {where.length} bytes in {where.file}, expected at least "
                    f"{box.volume * dtype.itemsize}"
                )
            shards[box] = where
        if problem := uncovered(shape, list(shards)):
            self._incomplete[key] = problem
        return ForeignTensor(dtype, shape, shards)

    def _paths(self, keys: list[str]) -> dict[str, LeafPath]:
        known = self._top.get("planner_data")
        known = _dict(known, "planner_data") if known is not None else {}
        paths = {key: _path(known[key], key, len(keys) + MAX_GAPS) if key in known else (key,) for key in keys}
        if len(set(paths.values())) < len(paths):
            raise ForeignCheckpointError("two keys have the same path in planner_data")
        return paths

    def _flattened(self, tensors: dict[str, ForeignTensor]) -> dict[str, Sizes]:
        known = self._top.get("mcore_data")
        known = _dict(known, "mcore_data") if known is not None else {}
        found: dict[str, Sizes] = {}
        for key, tensor in tensors.items():
            shape = _dict(known.get(key, {}), "mcore_data").get(ORIGINAL_SHAPE)
            if shape is not None and shape != tensor.shape:
                found[key] = _sizes(shape, key)
                chunk_shape(found[key], tensor.shape, key)
        return found


def chunk_shape(original: Sizes, stored: Sizes, key: str) -> Sizes:
    """Return the shape of each chunk of a flattened tensor.

    Args:
        original: shape of the tensor.
        stored: chunks along each dimension, and elements of a chunk.
        key: of the tensor, for the error.

    Raises:
        ForeignCheckpointError: the shapes do not fit.
    """
    counts = stored[:-1]
    if len(counts) == len(original) and all(n and size % n == 0 for size, n in zip(original, counts, strict=True)):
        chunk = tuple(size // n for size, n in zip(original, counts, strict=True))
        if math.prod(chunk) == stored[-1]:
            return chunk
    raise ForeignCheckpointError(f"tensor {key!r} has flattened chunks {stored}, which do not fit its shape {original}")


def _fields(value: Any, *kinds: str) -> dict[str, Any]:
    if not isinstance(value, Record) or value.kind not in kinds:
        found = value.kind if isinstance(value, Record) else type(value).__name__
        raise ForeignCheckpointError(f"the metadata has a {found} in place of a {kinds[0]}")
    return _dict({} if value.state is None else value.state, kinds[0])


def _dict(value: Any, what: str) -> dict[Any, Any]:
    if type(value) is not dict:
        raise ForeignCheckpointError(f"{what} of the metadata is a {type(value).__name__}, expected a dict")
    return value


def _sizes(value: Any, key: str) -> Sizes:
    if (
        type(value) not in (tuple, list)
        or len(value) > MAX_DIMENSIONS
        or any(type(one) is not int or not 0 <= one <= MAX_SIZE for one in value)
    ):
        raise ForeignCheckpointError(f"tensor {key!r} has an invalid size or offset")
    return tuple(value)


def _dtype(properties: Any, key: str) -> torch.dtype:
    state = properties.state if isinstance(properties, Record) and properties.kind == "TensorProperties" else None
    dtype = state[0] if type(state) is tuple and state else state.get("dtype") if type(state) is dict else None
    if not isinstance(dtype, DtypeName):
        raise ForeignCheckpointError(f"tensor {key!r} has no dtype")
    return TORCH_DTYPES[dtype.name]


def _range(fields: dict[str, Any], key: str) -> ByteRange:
    file, offset, length = fields.get("relative_path"), fields.get("offset"), fields.get("length")
    if type(offset) is not int or type(length) is not int or not (0 <= offset <= MAX_SIZE and 0 <= length <= MAX_SIZE):
        raise ForeignCheckpointError(f"{key!r} has an invalid position in its file")
    if type(file) is not str or "\0" in file or "\\" in file:
        raise ForeignCheckpointError(f"{key!r} has no file name")
    path = PurePosixPath(file)
    if path.is_absolute() or not path.parts or ".." in path.parts:
        raise ForeignCheckpointError(f"{key!r} is in file {file[:200]!r}, outside of the directory")
    if fields.get("transform_descriptors"):
        raise ForeignCheckpointError(
            f"{key!r} was written with extensions, which are not supported: save the checkpoint without _extensions"
        )
    return ByteRange(file, offset, length)


def _stored(stored: dict[tuple[str, Sizes], ByteRange], key: str, offset: Sizes) -> ByteRange:
    found = stored.get((key, offset)) or (stored.get((key, ())) if not any(offset) else None)
    if found is None:
        raise ForeignCheckpointError(f"{key!r} at {offset} is in no file: the save was incomplete")
    return found


def _path(value: Any, key: str, limit: int) -> LeafPath:
    if type(value) not in (tuple, list) or not 0 < len(value) <= MAX_DIMENSIONS:
        raise ForeignCheckpointError(f"{key!r} has an invalid path in planner_data")
    if any(type(step) is not str and not (type(step) is int and 0 <= step < limit) for step in value):
        raise ForeignCheckpointError(f"{key!r} has an invalid path in planner_data")
    if type(value[0]) is int:
        raise ForeignCheckpointError(f"the path of {key!r} begins with a number")
    return tuple(Index(step) if type(step) is int else step for step in value)
