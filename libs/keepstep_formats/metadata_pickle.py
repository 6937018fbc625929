"""Reader of the pickle in a ``.metadata`` file. Imports and calls nothing that the file names.

``pickle.Unpickler`` with a restricted ``find_class`` is not enough for a hostile file: an opcode of five bytes makes it
allocate 64 GiB for its memo. This reader knows only the opcodes and the classes of DCP's metadata. Objects become a
``Record`` of their fields. The memory that it needs is proportional to the size of the file.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, cast

from keepstep.state.values.leaves import TORCH_DTYPES
from keepstep_formats.foreign_errors import ForeignCheckpointError, RefusedClass

MAX_METADATA_BYTES = 1 << 30
_METADATA = "torch.distributed.checkpoint.metadata"
_OLD_METADATA = "torch.distributed._shard.sharded_tensor.metadata"
"""Module of TensorProperties until torch 2.2."""
_PLANNER = "torch.distributed.checkpoint.planner"
"""Megatron Core stores the plans of all ranks."""
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_CLASSES = {
    *((_METADATA, name) for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "TensorProperties")),
    *((_METADATA, name) for name in ("ChunkStorageMetadata", "MetadataIndex", "StorageMeta")),
    (_OLD_METADATA, "TensorProperties"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *((_PLANNER, name) for name in ("SavePlan", "WriteItem", "TensorWriteData")),
    *((_MEGATRON, name) for name in ("MCoreMetadata", "MCoreSavePlan")),
}


class _Op(IntEnum):
    """Opcodes of pickle, by their names in its module."""

    STOP = 0x2E
    PROTO = 0x80
    FRAME = 0x95
    MARK = 0x28
    POP = 0x30
    NONE = 0x4E
    NEWTRUE = 0x88
    NEWFALSE = 0x89
    BININT = 0x4A
    BININT1 = 0x4B
    BININT2 = 0x4D
    LONG1 = 0x8A
    BINFLOAT = 0x47
    SHORT_BINUNICODE = 0x8C
    BINUNICODE = 0x58
    SHORT_BINBYTES = 0x43
    BINBYTES = 0x42
    EMPTY_DICT = 0x7D
    EMPTY_LIST = 0x5D
    EMPTY_TUPLE = 0x29
    TUPLE = 0x74
    TUPLE1 = 0x85
    TUPLE2 = 0x86
    TUPLE3 = 0x87
    APPEND = 0x61
    APPENDS = 0x65
    SETITEM = 0x73
    SETITEMS = 0x75
    MEMOIZE = 0x94
    BINPUT = 0x71
    LONG_BINPUT = 0x72
    BINGET = 0x68
    LONG_BINGET = 0x6A
    GLOBAL = 0x63
    STACK_GLOBAL = 0x93
    NEWOBJ = 0x81
    REDUCE = 0x52
    BUILD = 0x62


class Record:
    """An object of the pickle.

    Attributes:
        kind: name of its class, without the module.
        state: what its class saved, usually a dict of fields. None: nothing.
    """

    __slots__ = ("kind", "state")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.state: Any = None


@dataclass(frozen=True, slots=True)
class DtypeName:
    """A ``torch.dtype``, by its name."""

    name: str


@dataclass(frozen=True, slots=True)
class _Global:
    module: str
    name: str


def _size(dimensions: Any = ()) -> tuple[int, ...]:
    if type(dimensions) not in (tuple, list) or any(type(one) is not int for one in dimensions):
        raise ForeignCheckpointError("torch.Size of values that are not integers")
    return tuple(dimensions)


_FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch", "Size"): _size,
    ("torch.serialization", "_get_layout"): lambda name: name,
    (_PLANNER, "WriteItemType"): lambda value: value,
    (_METADATA, "_MEM_FORMAT_ENCODING"): lambda value: value,
    (_OLD_METADATA, "MEM_FORMAT_ENCODING"): lambda value: value,
    ("collections", "OrderedDict"): dict,
    **{
        (module, name): lambda *parts: "/".join(parts)
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
    },
}
"""Functions that build plain values, by the names that the pickle calls them."""


def read_metadata_pickle(data: bytes) -> Any:
    """Return the value of the pickle ``data``: plain values, ``Record`` and ``DtypeName``.

    Raises:
        RefusedClass: the pickle names a class or function that DCP's metadata does not have.
        ForeignCheckpointError: the pickle is too large, damaged, or uses other opcodes.
    """
    if len(data) > MAX_METADATA_BYTES:
        raise ForeignCheckpointError(f"metadata too large: {len(data)} bytes (limit {MAX_METADATA_BYTES})")
    machine = _Machine(data)
    try:
        return machine.run()
    except (IndexError, KeyError, TypeError, ValueError, AttributeError, struct.error) as error:
        raise ForeignCheckpointError(
            f"metadata damaged at byte {machine.position}: {type(error).__name__}: {error}"
        ) from error


class _Machine:
    """The stack machine of pickle, protocols 2 to 5."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)
        self.position = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.left = len(data)
        """Values and characters that functions may copy: an honest file has each of them once."""

    def run(self) -> Any:
        while (opcode := self.take(1)[0]) != _Op.STOP:
            step = _STEPS.get(opcode)
            if step is None:
                raise ForeignCheckpointError(
                    f"opcode {opcode:#04x} at byte {self.position - 1} is not allowed: DCP's metadata has none of it"
                )
            step(self)
        return self.stack.pop()

    def take(self, count: int) -> memoryview:
        end = self.position + count
        if end > len(self._data):
            raise ForeignCheckpointError(f"metadata ends at byte {len(self._data)}, in the middle of a value")
        part = self._data[self.position : end]
        self.position = end
        return part

    def number(self, width: int) -> int:
        return int.from_bytes(self.take(width), "little")

    def text(self, width: int) -> None:
        self.stack.append(str(self.take(self.number(width)), "utf-8", "surrogatepass"))

    def line(self) -> str:
        end = self.position
        while self._data[end] != ord("\n"):
            end += 1
        return str(self.take(end + 1 - self.position)[:-1], "utf-8")

    def since_mark(self) -> list[Any]:
        start = self.marks.pop()
        items = self.stack[start:]
        del self.stack[start:]
        return items

    def put(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def tuple_of(self, count: int) -> None:
        items = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        self.stack.append(tuple(items))

    def append(self, items: list[Any]) -> None:
        cast("list[Any]", _exactly(list, self.stack[-1])).extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = _exactly(dict, self.stack[-1])
        for key, value in zip(items[::2], items[1::2], strict=True):
            if type(key) not in (str, int, Record):  # Python crashes when it hashes a tuple that is nested too deep
                raise ForeignCheckpointError(f"key of type {type(key).__name__} in the metadata")
            target[key] = value

    def find(self, module: Any, name: Any) -> None:
        if type(module) is not str or type(name) is not str:
            raise ForeignCheckpointError("the metadata names a class by a value that is no string")
        known = (module, name)
        if known in _CLASSES or known in _FUNCTIONS:
            self.stack.append(_Global(module, name))
            return
        if module == "torch" and name in TORCH_DTYPES:
            self.stack.append(DtypeName(name))
            return
        raise RefusedClass(
            f"refused {module[:100]}.{name[:100]}: the metadata of a DCP checkpoint has no such class or "
            f"function; it was not imported. Do not load this checkpoint with another program."
        )

    def create(self) -> None:
        arguments, what = self.stack.pop(), self.stack.pop()
        if type(what) is not _Global or (what.module, what.name) not in _CLASSES or arguments != ():
            raise ForeignCheckpointError("an object of the metadata has unknown arguments")
        self.stack.append(Record(what.name))

    def call(self) -> None:
        arguments, what = self.stack.pop(), self.stack.pop()
        if type(what) is not _Global or (what.module, what.name) not in _FUNCTIONS:
            raise ForeignCheckpointError("the metadata calls a value that is no function")
        self.left -= sum(len(one) for one in _exactly(tuple, arguments) if isinstance(one, str | tuple | list | dict))
        if self.left < 0:
            raise ForeignCheckpointError("the metadata copies more values than it has")
        self.stack.append(_FUNCTIONS[what.module, what.name](*arguments))

    def build(self) -> None:
        state = self.stack.pop()
        record = _exactly(Record, self.stack[-1])
        if record.state is not None:
            raise ForeignCheckpointError(f"a {record.kind} of the metadata has two states")
        record.state = state


def _exactly(kind: type, value: Any) -> Any:
    if type(value) is not kind:
        raise ForeignCheckpointError(f"the metadata has a {type(value).__name__}, expected a {kind.__name__}")
    return value


_STEPS: dict[int, Callable[[_Machine], Any]] = {
    _Op.PROTO: lambda m: m.take(1),
    _Op.FRAME: lambda m: m.take(8),
    _Op.MARK: lambda m: m.marks.append(len(m.stack)),
    _Op.POP: lambda m: m.stack.pop(),
    _Op.NONE: lambda m: m.stack.append(None),
    _Op.NEWTRUE: lambda m: m.stack.append(True),
    _Op.NEWFALSE: lambda m: m.stack.append(False),
    _Op.BININT: lambda m: m.stack.append(int.from_bytes(m.take(4), "little", signed=True)),
    _Op.BININT1: lambda m: m.stack.append(m.number(1)),
    _Op.BININT2: lambda m: m.stack.append(m.number(2)),
    _Op.LONG1: lambda m: m.stack.append(int.from_bytes(m.take(m.number(1)), "little", signed=True)),
    _Op.BINFLOAT: lambda m: m.stack.append(struct.unpack(">d", m.take(8))[0]),
    _Op.SHORT_BINUNICODE: lambda m: m.text(1),
    _Op.BINUNICODE: lambda m: m.text(4),
    _Op.SHORT_BINBYTES: lambda m: m.stack.append(bytes(m.take(m.number(1)))),
    _Op.BINBYTES: lambda m: m.stack.append(bytes(m.take(m.number(4)))),
    _Op.EMPTY_DICT: lambda m: m.stack.append({}),
    _Op.EMPTY_LIST: lambda m: m.stack.append([]),
    _Op.EMPTY_TUPLE: lambda m: m.stack.append(()),
    _Op.TUPLE: lambda m: m.stack.append(tuple(m.since_mark())),
    _Op.TUPLE1: lambda m: m.tuple_of(1),
    _Op.TUPLE2: lambda m: m.tuple_of(2),
    _Op.TUPLE3: lambda m: m.tuple_of(3),
    _Op.APPEND: lambda m: m.append([m.stack.pop()]),
    _Op.APPENDS: lambda m: m.append(m.since_mark()),
    _Op.SETITEM: lambda m: m.set_items([m.stack.pop(-2), m.stack.pop()]),
    _Op.SETITEMS: lambda m: m.set_items(m.since_mark()),
    _Op.MEMOIZE: lambda m: m.put(len(m.memo)),
    _Op.BINPUT: lambda m: m.put(m.number(1)),
    _Op.LONG_BINPUT: lambda m: m.put(m.number(4)),
    _Op.BINGET: lambda m: m.stack.append(m.memo[m.number(1)]),
    _Op.LONG_BINGET: lambda m: m.stack.append(m.memo[m.number(4)]),
    _Op.GLOBAL: lambda m: m.find(m.line(), m.line()),
    _Op.STACK_GLOBAL: lambda m: m.find(m.stack.pop(-2), m.stack.pop()),
    _Op.NEWOBJ: lambda m: m.create(),
    _Op.REDUCE: lambda m: m.call(),
    _Op.BUILD: lambda m: m.build(),
}
