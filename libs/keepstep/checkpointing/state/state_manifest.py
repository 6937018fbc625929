"""The manifest: structure, memory layout and digests of a pack. docs/checkpoint-format.md describes the format.

A manifest from the network is untrusted. Sizes, indices, strides and nesting are checked before memory is allocated for
them. ``keepstep_mesh.protocol.manifest`` has the envelope, which relays read too.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import Any

import msgpack

from keepstep.checkpointing.errors import UnsupportedValue
from keepstep.checkpointing.state.leaves import TORCH_DTYPES, numpy_dtype
from keepstep.checkpointing.state.sharding import Sharding
from keepstep_mesh.errors import ManifestError
from keepstep_mesh.protocol.manifest import (
    CHUNK_BYTES,
    MAX_MANIFEST_BYTES,
    MAX_PACK_BYTES,
    Origin,
    chunk_digest,
    glimpse,
    pack_envelope,
    read_envelope,
    region_positions,
    size,
    typed,
)

MAX_DEPTH = 64
"""Deepest nesting of dicts, lists and tuples."""
MAX_DIMENSIONS = 64
BYTES = "bytes"
"""The ``dtype`` of a long Python bytes object, which is stored in the pack."""
NUMPY = "numpy:"
"""Prefix of the ``dtype`` of a numpy array; the rest is numpy's ``dtype.str``."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor, numpy array or bytes object. Entries that overlap in one region share memory (tied weights)."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    """In elements; None: contiguous."""
    region: int
    offset: int
    """Position of the first element in the region, in bytes."""
    sharding: Sharding | None = None

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        if self.dtype == BYTES:
            return 1
        if self.dtype.startswith(NUMPY):
            return numpy_dtype(self.dtype.removeprefix(NUMPY)).itemsize
        return TORCH_DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Content:
    """Structure and memory layout of a state, without its bytes."""

    tree: Any
    tensors: tuple[TensorEntry, ...]
    regions: tuple[int, ...]
    """Length in bytes of each region. The pack has the regions in this order, each aligned."""

    def positions(self) -> list[int]:
        """Return the position of each region in the pack, and the length of the pack."""
        return region_positions(self.regions)


@dataclass(frozen=True)
class Manifest:
    """A decoded manifest."""

    origin: Origin
    content: Content
    content_bytes: bytes
    """``content`` as sent. The root digest covers these bytes."""
    chunk_digests: tuple[bytes, ...]
    root: bytes

    @property
    def pack_bytes(self) -> int:
        return self.content.positions()[-1]


def pack_content(content: Content) -> bytes:
    """Return the bytes of ``content``. Equal states have equal bytes."""
    rows = [
        [
            entry.dtype,
            entry.shape,
            entry.strides,
            entry.region,
            entry.offset,
            None if entry.sharding is None else astuple(entry.sharding),
        ]
        for entry in content.tensors
    ]
    packed: bytes = msgpack.packb([content.tree, rows, content.regions])
    return packed


def build_manifest(origin: Origin, content_bytes: bytes, pack: memoryview) -> bytes:
    """Hash ``pack`` (about 30 GB/s; releases the GIL), and return its manifest.

    Raises:
        UnsupportedValue: the manifest is larger than the limit.
    """
    digests = b"".join(chunk_digest(pack[start : start + CHUNK_BYTES]) for start in range(0, len(pack), CHUNK_BYTES))
    manifest = pack_envelope(origin, content_bytes, digests)
    if len(manifest) > MAX_MANIFEST_BYTES:
        raise UnsupportedValue(
            f"structure of the state too large: {len(manifest)} bytes (limit {MAX_MANIFEST_BYTES}); "
            f"store bulk data in tensors, numpy arrays or bytes"
        )
    return manifest


def read_manifest(data: bytes) -> Manifest:
    """Decode and check a manifest from an untrusted source. Raises ``ManifestError``."""
    envelope = read_envelope(data)
    content = read_content(envelope.content_bytes)
    return Manifest(envelope.origin, content, envelope.content_bytes, envelope.chunk_digests, envelope.root)


def _unpack(data: bytes, what: str) -> Any:
    try:
        return msgpack.unpackb(data)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise ManifestError(f"{what} is not msgpack: {str(error) or type(error).__name__}") from error


def _sizes(value: Any, what: str) -> tuple[int, ...]:
    if len(typed(value, list, what)) > MAX_DIMENSIONS:
        raise ManifestError(f"{what} has too many numbers: {len(value)} (limit {MAX_DIMENSIONS})")
    return tuple([size(one, what) for one in value])


def _names(value: Any, what: str) -> tuple[str, ...]:
    if len(typed(value, list, what)) > MAX_DIMENSIONS:
        raise ManifestError(f"{what} has too many names: {len(value)} (limit {MAX_DIMENSIONS})")
    return tuple([typed(one, str, what) for one in value])


def read_content(content_bytes: bytes) -> Content:
    """Decode and check the content of a manifest from an untrusted source. Raises ``ManifestError``."""
    value = _unpack(content_bytes, "content")
    if type(value) is not list or len(value) != 3:
        raise ManifestError("content must be a list of tree, tensors and regions")
    tree, rows, lengths = value
    regions = tuple([size(length, "length of a region") for length in typed(lengths, list, "regions")])
    entries = tuple(
        [_read_entry(row, regions, f"tensor {index}") for index, row in enumerate(typed(rows, list, "tensors"))]
    )
    if len({entry.region for entry in entries}) != len(regions):
        raise ManifestError("a region of the manifest belongs to no tensor")
    if len(_references(tree, len(entries))) != len(entries):
        raise ManifestError("the tree does not refer to every tensor")
    return Content(tree, entries, regions)


def _read_entry(row: Any, regions: tuple[int, ...], what: str) -> TensorEntry:
    if type(row) is not list or len(row) != 6:
        raise ManifestError(f"{what} must be a list of 6 fields")
    dtype, shape, strides, region, offset, sharding = row
    if type(dtype) is not str or not (dtype in TORCH_DTYPES or dtype == BYTES or dtype.startswith(NUMPY)):
        raise ManifestError(f"{what} has unknown dtype {glimpse(dtype)}")
    entry = TensorEntry(
        dtype,
        _sizes(shape, f"shape of {what}"),
        None if strides is None else _sizes(strides, f"strides of {what}"),
        size(region, f"region of {what}"),
        size(offset, f"offset of {what}"),
        None if sharding is None else _read_sharding(sharding, f"sharding of {what}"),
    )
    if entry.region >= len(regions):
        raise ManifestError(f"{what} lies in region {entry.region} of {len(regions)}")
    itemsize, length = entry.itemsize, regions[entry.region]
    if entry.strides is not None and (len(entry.strides) != len(entry.shape) or dtype not in TORCH_DTYPES):
        raise ManifestError(f"the strides of {what} do not fit its shape")
    if math.prod(max(size, 1) for size in entry.shape) > MAX_PACK_BYTES:
        raise ManifestError(f"{what} too large: shape {entry.shape} (limit {MAX_PACK_BYTES} bytes)")
    elements = math.prod(entry.shape)
    extent = elements
    if entry.strides is not None and elements:
        extent = 1 + sum((size - 1) * stride for size, stride in zip(entry.shape, entry.strides, strict=True))
    if max(elements, extent) * itemsize + entry.offset > length or entry.offset % itemsize:
        raise ManifestError(
            f"{what} of shape {entry.shape}, {dtype}, at byte {entry.offset} does not fit its region of {length} bytes"
        )
    return entry


def _read_sharding(value: Any, what: str) -> Sharding:
    if type(value) is not list or len(value) != 5:
        raise ManifestError(f"{what} must be a list of 5 fields")
    return Sharding(
        _sizes(value[0], what),
        _sizes(value[1], what),
        _sizes(value[2], what),
        _names(value[3], what),
        _names(value[4], what),
    )


def _references(tree: Any, tensors: int) -> set[int]:
    """Check the nesting of ``tree``, and return the entries that it refers to. Does not decode the leaves."""
    found: set[int] = set()
    level, depth = [tree], 0
    while level:
        if depth > MAX_DEPTH:
            raise ManifestError(f"the tree is nested more than {MAX_DEPTH} deep")
        below: list[Any] = []
        for node in level:
            if type(node) is not list or not node:
                continue
            if node[0] == "tensor":
                if len(node) != 2 or type(node[1]) is not int or not 0 <= node[1] < tensors:
                    raise ManifestError(f"the tree refers to tensor {glimpse(node[-1])} of {tensors}")
                found.add(node[1])
            else:
                below.extend(one for one in node[1:] if type(one) is list)
        level, depth = below, depth + 1
    return found
