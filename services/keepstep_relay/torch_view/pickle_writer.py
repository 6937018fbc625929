"""Pickles of values of torch, written opcode by opcode without torch. Bytes of a pack may be in their middle.

A pickle here is data for a reader that already runs pickles, such as torch.distributed.checkpoint. It names only the
classes that this package names; no byte of it comes from an opcode of a client.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date, time, timedelta, timezone
from itertools import chain
from pickle import (
    APPENDS,
    BINBYTES,
    BINBYTES8,
    BINFLOAT,
    BININT,
    BINPERSID,
    BINUNICODE,
    BUILD,
    EMPTY_DICT,
    EMPTY_LIST,
    EMPTY_TUPLE,
    GLOBAL,
    LONG1,
    LONG4,
    LONG_BINGET,
    LONG_BINPUT,
    MARK,
    NEWFALSE,
    NEWOBJ,
    NEWTRUE,
    NONE,
    PROTO,
    REDUCE,
    SETITEMS,
    STOP,
    TUPLE,
    encode_long,
)
from typing import Any, TypeAlias

_PROTOCOL = b"\x02"
"""Opcodes of later protocols are used for bytes only."""


@dataclass(frozen=True, slots=True)
class PackRange:
    """Bytes of the pack of a rank."""

    rank: int
    offset: int
    length: int


Segment: TypeAlias = bytes | PackRange


# ---- values besides None, bool, int, float, str, bytes, tuple, list, dict, and those of datetime


@dataclass(frozen=True, slots=True)
class Global:
    """A class, function, or constant of a module."""

    module: str
    name: str


@dataclass(frozen=True, slots=True)
class Call:
    """The result of a call. ``items``: set on it. ``state``: given to its ``__setstate__``, or its attributes."""

    function: Global
    arguments: tuple[Any, ...] = ()
    items: Items | None = None
    state: Any = None


@dataclass(frozen=True, slots=True)
class Instance:
    """A new object without a call of ``__init__``. ``state``: see ``Call``."""

    kind: Global
    state: Any = None


@dataclass(frozen=True, slots=True)
class Persistent:
    """A value that the reader of the pickle finds by its id."""

    id: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Items:
    """A dict, as pairs: its keys may be values of this module."""

    pairs: tuple[tuple[Any, Any], ...]


@dataclass(frozen=True, slots=True)
class BytesOfPack:
    """A bytes object whose content is in a pack."""

    where: PackRange


class SegmentWriter:
    """Writes bytes, and ranges of packs between them.

    Attributes:
        size: bytes so far.
    """

    def __init__(self) -> None:
        self._segments: list[Segment] = []
        self._literal = bytearray()
        self.size = 0

    def write(self, data: bytes) -> None:
        """Add bytes."""
        self._literal += data
        self.size += len(data)

    def refer(self, where: PackRange) -> None:
        """Add bytes of a pack."""
        if where.length:
            self._flush()
            self._segments.append(where)
            self.size += where.length

    def _flush(self) -> None:
        if self._literal:
            self._segments.append(bytes(self._literal))
            self._literal.clear()

    def segments(self) -> list[Segment]:
        """Return everything that was added, in order."""
        self._flush()
        return self._segments


def write_pickle(into: SegmentWriter, value: Any) -> None:
    """Write the pickle of ``value``. Raises ``TypeError`` for a type that this module does not name."""
    into.write(PROTO + _PROTOCOL)
    _Pickle(into).add(value)
    into.write(STOP)


class _Pickle:
    """One pickle. Classes are named once; later they are taken from the memo."""

    def __init__(self, into: SegmentWriter) -> None:
        self._into = into
        self._write = into.write
        self._memo: dict[Global, int] = {}

    def add(self, value: Any) -> None:
        write = self._write
        match value:
            case None:
                write(NONE)
            case bool():
                write(NEWTRUE if value else NEWFALSE)
            case int():
                write(_integer(value))
            case float():
                write(BINFLOAT + struct.pack(">d", value))
            case str():
                data = value.encode("utf-8", "surrogatepass")
                write(BINUNICODE + struct.pack("<I", len(data)) + data)
            case bytes():
                write(BINBYTES + struct.pack("<I", len(value)) + value)
            case BytesOfPack(where):
                write(BINBYTES8 + struct.pack("<Q", where.length))
                self._into.refer(where)
            case tuple():
                self._add_all(value, MARK, TUPLE)
            case list():
                self._add_all(value, EMPTY_LIST + MARK, APPENDS)
            case dict():
                self._add_all(chain.from_iterable(value.items()), EMPTY_DICT + MARK, SETITEMS)
            case Items(pairs):
                self._add_all(chain.from_iterable(pairs), EMPTY_DICT + MARK, SETITEMS)
            case Global():
                self._add_global(value)
            case Call(function, arguments, items, state):
                self._add_global(function)
                self.add(arguments)
                write(REDUCE)
                if items is not None:
                    self._add_all(chain.from_iterable(items.pairs), MARK, SETITEMS)
                self._set_state(state)
            case Instance(kind, state):
                self._add_global(kind)
                write(EMPTY_TUPLE + NEWOBJ)
                self._set_state(state)
            case Persistent(name):
                self.add(name)
                write(BINPERSID)
            case date() | time() | timedelta() | timezone():
                reduced: Any = value.__reduce_ex__(4)  # class and arguments; protocol 4 has ``fold``
                self.add(Call(Global("datetime", type(value).__name__), reduced[1]))
            case _:
                raise TypeError(f"a pickle of {type(value).__name__} is not supported")

    def _add_all(self, values: Iterable[Any], before: bytes, after: bytes) -> None:
        self._write(before)
        for value in values:
            self.add(value)
        self._write(after)

    def _set_state(self, state: Any) -> None:
        if state is not None:
            self.add(state)
            self._write(BUILD)

    def _add_global(self, value: Global) -> None:
        known = self._memo.get(value)
        if known is not None:
            self._write(LONG_BINGET + struct.pack("<I", known))
            return
        self._memo[value] = number = len(self._memo)
        self._write(GLOBAL + f"{value.module}\n{value.name}\n".encode() + LONG_BINPUT + struct.pack("<I", number))


def _integer(value: int) -> bytes:
    if -(1 << 31) <= value < 1 << 31:
        return BININT + struct.pack("<i", value)
    data = encode_long(value)
    return LONG1 + bytes([len(data)]) + data if len(data) < 256 else LONG4 + struct.pack("<i", len(data)) + data


def cut(segments: Iterable[Segment], first: int, end: int) -> Iterator[Segment]:
    """Yield the bytes of ``segments`` from ``first`` to before ``end``."""
    at = 0
    for segment in segments:
        size = segment.length if isinstance(segment, PackRange) else len(segment)
        begin, stop = max(first - at, 0), min(end - at, size)
        if begin < stop:
            if isinstance(segment, PackRange):
                yield PackRange(segment.rank, segment.offset + begin, stop - begin)
            else:
                yield segment[begin:stop]
        at += size
        if at >= end:
            return
