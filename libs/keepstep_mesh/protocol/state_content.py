"""Content of a manifest: the structure of a state, and where its tensors lie in the pack. docs/checkpoint-format.md
describes the format.

A manifest from the network is untrusted. Sizes, indices, strides and nesting are checked before memory is allocated for
them. ``manifest`` has the envelope around the content.
"""

from __future__ import annotations

import math
import re
from dataclasses import astuple, dataclass
from typing import Any

import msgpack

from keepstep_mesh.errors import ManifestError
from keepstep_mesh.protocol.manifest import MAX_PACK_BYTES, glimpse, region_positions, size, typed
from keepstep_mesh.protocol.records import Format

MAX_DEPTH = 64
"""Deepest nesting of dicts, lists and tuples."""
MAX_DIMENSIONS = 64
BYTES = "bytes"
"""The ``dtype`` of a long Python bytes object, which is stored in the pack."""
NUMPY = "numpy:"
"""Prefix of the ``dtype`` of a numpy array; the rest is numpy's ``dtype.str``."""
ITEM_BYTES = {
    **dict.fromkeys(("bool", "uint8", "int8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("float8_e8m0fnu", "float4_e2m1fn_x2", "bits8", "bits1x8", "bits2x4", "bits4x2"), 1),
    **{f"{kind}{bits}": 1 for kind in ("int", "uint") for bits in range(1, 8)},
    **dict.fromkeys(("int16", "uint16", "float16", "bfloat16", "bits16"), 2),
    **dict.fromkeys(("int32", "uint32", "float32", "complex32"), 4),
    **dict.fromkeys(("int64", "uint64", "float64", "complex64"), 8),
    "complex128": 16,
}
"""Bytes of one element, by the name of the dtype of a tensor."""
NUMPY_DTYPE = re.compile(
    r"[<>|](?:(?P<kind>[biufcSU])(?P<size>[1-9]\d{0,8})|[mM]8(?:\[([1-9]\d{0,8})?(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?)"
)
"""``dtype.str`` of the numpy arrays that a manifest can hold."""


@dataclass(frozen=True, slots=True)
class Sharding:
    """The position of a local shard in its global tensor."""

    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    """Position of the first element of the shard, in elements of each dimension."""
    mesh_shape: tuple[int, ...]
    mesh_names: tuple[str, ...]
    """Names of the dimensions of the device mesh; empty: they have no names."""
    placements: tuple[str, ...]
    """One for each dimension of the device mesh, as torch prints it: ``S(0)``, ``R``, ``P(sum)``."""


@dataclass(frozen=True, slots=True)
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
        if (found := ITEM_BYTES.get(self.dtype)) is not None:
            return found
        matched = NUMPY_DTYPE.fullmatch(self.dtype.removeprefix(NUMPY)) if self.dtype.startswith(NUMPY) else None
        if matched is None:
            raise ManifestError(f"unsupported numpy dtype {glimpse(self.dtype.removeprefix(NUMPY))}")
        characters = 4 if matched["kind"] == "U" else 1
        return 8 if matched["size"] is None else characters * int(matched["size"])

    @property
    def steps(self) -> tuple[int, ...]:
        """Its strides in elements, also if it is contiguous."""
        if self.strides is not None:
            return self.strides
        steps, step = [], 1
        for length in reversed(self.shape):
            steps.append(step)
            step *= max(length, 1)
        return tuple(reversed(steps))


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


_FORMAT = Format(
    ManifestError,
    {int: size, str: lambda value, what: typed(value, str, what)},
    {int: f"type({{x}}) is not int or not 0 <= {{x}} <= {MAX_PACK_BYTES}", str: "type({x}) is not str"},
    most_items=MAX_DIMENSIONS,
)
_SHARDING = _FORMAT.of_list(Sharding, "sharding", exact=True)
_ENTRY = _FORMAT.of_list(TensorEntry, "", exact=True)

PARTS = frozenset(("tensor", "dict", "odict", "wrapped", "quantized", "shard"))
"""Names of the nodes that are values of their own in a list that contains one."""


def plain_container(node: Any) -> Any:
    """Return the dict or list that is the content of one of another class; any other node: itself."""
    if type(node) is list and len(node) > 2 and node[0] in ("defaultdict", "instance"):
        content = node[2]
        if type(content) is list and content and content[0] in ("dict", "odict", "list"):
            return content
    return node


def _unpack(data: bytes, what: str) -> Any:
    try:
        return msgpack.unpackb(data)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise ManifestError(f"{what} is not msgpack: {str(error) or type(error).__name__}") from error


def unpack_content(content_bytes: bytes) -> Content:
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
    try:
        entry: TensorEntry = _ENTRY(row, "its row")
    except ManifestError as error:
        raise ManifestError(f"{what}: {error}") from error
    dtype = entry.dtype
    if not (dtype in ITEM_BYTES or dtype == BYTES or dtype.startswith(NUMPY)):
        raise ManifestError(f"{what} has unknown dtype {glimpse(dtype)}")
    if entry.region >= len(regions):
        raise ManifestError(f"{what} lies in region {entry.region} of {len(regions)}")
    itemsize, length = entry.itemsize, regions[entry.region]
    if entry.strides is not None and (len(entry.strides) != len(entry.shape) or dtype not in ITEM_BYTES):
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


def read_sharding(value: Any, what: str) -> Sharding:
    """Check the fields of a sharding. Raises ``ManifestError``."""
    sharding: Sharding = _SHARDING(value, what)
    return sharding


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
