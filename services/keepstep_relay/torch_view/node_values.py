"""Values in the tree of a manifest, as values of ``pickle_writer``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import date, datetime, time, timedelta
from typing import Any

from keepstep_mesh.errors import ManifestError
from keepstep_mesh.protocol.manifest import glimpse
from keepstep_mesh.protocol.state_content import BYTES, ITEM_BYTES, NUMPY, NUMPY_DTYPE, Content, TensorEntry
from keepstep_mesh.protocol.stored_keys import kind_of
from keepstep_relay.torch_view.pickle_writer import (
    BytesOfPack,
    Call,
    Global,
    Items,
    PackRange,
    Persistent,
)

MAX_INTEGER_BYTES = 1 << 16
MAX_KEY_BYTES = 1024
"""Of an integer that is a key. Python does not convert much longer ones to text."""
_NUMPY = "numpy.core.multiarray"
"""Known to numpy 1 and 2."""


def torch_size(sizes: Sequence[int]) -> Call:
    """Return a ``torch.Size``."""
    return Call(Global("torch", "Size"), (tuple(sizes),))


def torch_dtype(name: str) -> Global:
    """Return a ``torch.dtype``. Raises ``ManifestError``."""
    if name not in ITEM_BYTES:
        raise ManifestError(f"unknown dtype {glimpse(name)}")
    return Global("torch", name)


def read_key(node: Any, what: str) -> Any:
    """Return the key of a dict, as far as its text needs it: a tuple, or a scalar. Raises ``ManifestError``."""
    match node:
        case ["tuple", *items]:
            return tuple([read_key(item, what) for item in items])
        case ["int", bytes(data)] if len(data) <= MAX_KEY_BYTES:
            return int.from_bytes(data, "little", signed=True)
        case ["int", *fields]:
            found = f"{len(fields[0])} bytes" if fields and type(fields[0]) is bytes else str(fields)[:40]
            raise ManifestError(f"invalid integer as a {what}: {found}, expected 1 to {MAX_KEY_BYTES} bytes")
    return node if type(node) is not list else str(node)


def extent(entry: TensorEntry) -> int:
    """Return the bytes from the first to the last element of a tensor."""
    if not math.prod(entry.shape):
        return 0
    if entry.strides is None:
        return math.prod(entry.shape) * entry.itemsize
    return (1 + sum((size - 1) * step for size, step in zip(entry.shape, entry.strides, strict=True))) * entry.itemsize


def tensor_value(entry: TensorEntry, storage: str) -> Call:
    """Return a tensor whose bytes follow the pickle as the storage of that name. See ``torch_files``."""
    stored = ("storage", Global("torch", "ByteStorage"), storage, "cpu", extent(entry), None)
    hooks = Call(Global("collections", "OrderedDict"))
    return Call(
        Global("torch._utils", "_rebuild_tensor_v3"),
        (Persistent(stored), 0, entry.shape, entry.steps, False, hooks, torch_dtype(entry.dtype)),
    )


class NodeValues:
    """Converts the nodes of one rank.

    Attributes:
        storages: bytes of the tensors of the values that were converted. The name of each is its position.
    """

    def __init__(self, rank: int, content: Content) -> None:
        self._rank = rank
        self._content = content
        self._positions = content.positions()
        self.storages: list[PackRange] = []

    def value(self, node: Any) -> Any:
        """Return the value of a node. Raises ``ManifestError``."""
        if node is None or type(node) in (bool, int, float, str, bytes):
            return node
        kind = kind_of(node)
        if kind is None:
            raise ManifestError(f"a value of the tree is {glimpse(node)}")
        try:
            return self._of_kind(kind, node[1:])
        except (TypeError, ValueError, IndexError, OverflowError, AttributeError) as error:
            raise ManifestError(f"a {glimpse(kind)} of the tree is invalid: {error}") from error

    def _of_kind(self, kind: str, fields: list[Any]) -> Any:
        match kind:
            case "tensor":
                return self._tensor(self._content.tensors[fields[0]])
            case "list":
                return [self.value(one) for one in fields]
            case "tuple":
                return tuple([self.value(one) for one in fields])
            case "dict":
                return self._items(fields)
            case "odict":
                metadata = self.value(fields[0])
                state = None if metadata is None else {"_metadata": metadata}
                return Call(Global("collections", "OrderedDict"), (), self._items(fields[1:]), state)
            case "set" | "frozenset":
                return Call(Global("builtins", kind), ([self.value(one) for one in fields],))
            case "int":
                return _integer(fields[0])
            case "complex":
                return Call(Global("builtins", "complex"), (float(fields[0]), float(fields[1])))
            case "size":
                return torch_size([self.value(one) for one in fields])
            case "dtype":
                return torch_dtype(fields[0])
            case "device":
                return Call(Global("torch", "device"), (str(fields[0]),))
            case "scalar":
                return Call(Global(_NUMPY, "scalar"), (_numpy_dtype(fields[0]), bytes(fields[1])))
            case "datetime":
                return datetime.fromisoformat(fields[0]).replace(fold=fields[1])  # without the name of its zone
            case "time":
                return time.fromisoformat(fields[0]).replace(fold=fields[1])
            case "date":
                return date.fromisoformat(fields[0])
            case "timedelta":
                return timedelta(*fields)
            case "bytearray":
                return Call(Global("builtins", "bytearray"), (self.value(fields[0]),))
            case "bytesio":
                return Call(Global("_io", "BytesIO"), (), None, (self.value(fields[1]), int(fields[0]), None))
            case "deque":
                return Call(Global("collections", "deque"), ([self.value(one) for one in fields[1:]], fields[0]))
            case "path":
                return str(self.value(fields[1]))
            case "enum" | "defaultdict" | "instance" | "dataclass":  # the content: a reader may not have the class
                return self.value(fields[1])
            case "qscheme" | "layout" | "memory_format":
                return str(fields[0])
            case "wrapped" | "quantized" | "shard":
                raise ManifestError(
                    "it is a tensor that wraps others or is quantized, which plain torch cannot load from here: load "
                    "it with keepstep.checkpoint.load or RelayReader"
                )
        raise ManifestError(f"unknown type {glimpse(kind)} in the tree")

    def _items(self, fields: list[Any]) -> Items:
        keys, values = fields[::2], fields[1::2]
        return Items(tuple([(self.value(key), self.value(value)) for key, value in zip(keys, values, strict=True)]))

    def _tensor(self, entry: TensorEntry) -> Any:
        where = PackRange(self._rank, self._positions[entry.region] + entry.offset, extent(entry))
        if entry.dtype == BYTES:
            return BytesOfPack(where)
        if not entry.dtype.startswith(NUMPY):
            self.storages.append(where)
            return tensor_value(entry, str(len(self.storages) - 1))
        kind, dtype = Global("numpy", "ndarray"), _numpy_dtype(entry.dtype.removeprefix(NUMPY))
        state = (1, entry.shape, dtype, False, BytesOfPack(where))
        return Call(Global(_NUMPY, "_reconstruct"), (kind, (0,), b"b"), None, state)


def _integer(data: bytes) -> int:
    if len(data) > MAX_INTEGER_BYTES:
        raise ManifestError(f"integer too long: {len(data)} bytes (limit {MAX_INTEGER_BYTES})")
    return int.from_bytes(data, "little", signed=True)


def _numpy_dtype(name: str) -> Call:
    if not NUMPY_DTYPE.fullmatch(name):
        raise ManifestError(f"unsupported numpy dtype {glimpse(name)}")
    return Call(Global("numpy", "dtype"), (name,))
