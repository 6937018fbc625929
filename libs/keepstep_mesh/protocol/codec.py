"""Encode and decode messages. Invalid input raises ``ProtocolError``, which names the message and its field.

A frame is one msgpack array: the kind, then the fields in order. The decoders are generated from the type hints of the
dataclasses. They check types and sizes, and ignore fields appended by a newer peer.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import msgpack

from keepstep_mesh.errors import ProtocolError, VersionError
from keepstep_mesh.protocol.frozen_records import maker
from keepstep_mesh.protocol.group_messages import RankQuorum, WithinGroup
from keepstep_mesh.protocol.membership import MAX_DATA_BYTES, MemberInfo, Sentence
from keepstep_mesh.protocol.messages import (
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    RETRY_VERSION,
    Hello,
    QuorumAnswer,
    ToLighthouse,
    ToWorker,
    Welcome,
)
from keepstep_mesh.text import printable

MAX_FRAME_BYTES = 1024 * 1024
"""Limit of a frame from a worker."""
MAX_SERVER_FRAME_BYTES = 256 * 1024 * 1024
"""Limit of a frame from a lighthouse: a full member list with the data of every member."""
PACK_BUFFER_BYTES = 4096
"""Initial buffer of an encoder; a larger message grows it. msgpack's default, 256 KiB, takes as long as a small
message."""
MAX_TEXT = 4096
MAX_ITEMS = 65536
MAX_LIBRARY = 80
"""Characters of the name of a library in an error."""

Decoder = Callable[[Any, str], Any]
Message = ToLighthouse | ToWorker | WithinGroup


def _is(kind: type, name: str) -> Decoder:
    def decode(value: Any, path: str) -> Any:
        if type(value) is not kind:
            raise ProtocolError(f"{path} must be {name}, not {type(value).__name__}")
        return value

    return decode


def _text(value: Any, path: str) -> str:
    if type(value) is not str:
        raise ProtocolError(f"{path} must be a string, not {type(value).__name__}")
    if len(value) > MAX_TEXT:
        raise ProtocolError(f"{path} too long: {len(value)} characters (limit {MAX_TEXT})")
    return value


def _sentence(value: Any, path: str) -> str:
    """Longer ones are cut, and not refused: a lighthouse puts that of one group into its own."""
    if type(value) is not str:
        raise ProtocolError(f"{path} must be a string, not {type(value).__name__}")
    return printable(value[:MAX_TEXT])[:MAX_TEXT]


def _whole(value: Any, path: str) -> int:
    if type(value) is not int:
        raise ProtocolError(f"{path} must be an integer, not {type(value).__name__}")
    if not 0 <= value < 1 << 63:
        raise ProtocolError(f"{path} must be in [0, 2^63), not {value}")
    return value


def _real(value: Any, path: str) -> float:
    if type(value) not in (int, float):
        raise ProtocolError(f"{path} must be a number, not {type(value).__name__}")
    number = float(value)
    if not math.isfinite(number):
        raise ProtocolError(f"{path} must be finite")
    return number


def _data(value: Any, path: str) -> Any:
    if value is None:
        return None
    try:
        size = len(pack(value))
    except (TypeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"{path} cannot be encoded as msgpack: {error}") from error
    if size > MAX_DATA_BYTES:
        raise ProtocolError(f"{path} too large: {size} bytes (limit {MAX_DATA_BYTES}); pass a URL instead")
    return value


def _union(choices: list[Any], path_name: str) -> Decoder:
    optional = type(None) in choices
    rest = [_decoder(choice, path_name) for choice in choices if choice is not type(None)]
    if optional and len(rest) == 1:
        only = rest[0]
        return lambda value, path: None if value is None else only(value, path)

    def decode(value: Any, path: str) -> Any:
        if value is None and optional:
            return None
        for number, decoder in enumerate(rest):
            try:
                return decoder(value, path)
            except ProtocolError:
                if number == len(rest) - 1:
                    raise
        raise ProtocolError(f"{path} must be null")

    return decode


def _sequence(item: Any, path_name: str) -> Decoder:
    decode_item = _decoder(item, path_name)

    def decode(value: Any, path: str) -> Any:
        if type(value) is not list:
            raise ProtocolError(f"{path} must be a list, not {type(value).__name__}")
        if len(value) > MAX_ITEMS:
            raise ProtocolError(f"{path} too long: {len(value)} items (limit {MAX_ITEMS})")
        return tuple([decode_item(one, path) for one in value])

    return decode


def _record(cls: type, name: str) -> Decoder:
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = dataclasses.fields(cls)
    decoders = [(_decoder(hints[f.name], f"{name}.{f.name}"), f"{name}.{f.name}") for f in fields]
    required = sum(f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING for f in fields)
    most = len(fields)

    def decode(value: Any, path: str) -> Any:
        if type(value) is not list:
            raise ProtocolError(f"{path} must be a list of fields, not {type(value).__name__}")
        if len(value) < required:
            raise ProtocolError(f"{path} has {len(value)} fields; expected at least {required}")
        if len(value) > most:
            value = value[:most]
        return cls(*[one(raw, where) for (one, where), raw in zip(decoders, value, strict=False)])

    return _in_line(cls, [hints[f.name] for f in fields], decoders, decode)


_WRONG: dict[Any, str] = {
    int: "type({x}) is not int or not 0 <= {x} < 9223372036854775808",
    str: f"type({{x}}) is not str or len({{x}}) > {MAX_TEXT}",
    Sentence: f"type({{x}}) is not str or len({{x}}) > {MAX_TEXT} or not {{x}}.isprintable()",
    bool: "type({x}) is not bool",
    object: "{x} is not None",
}
"""Condition under which a value of this type needs its decoder."""


def _in_line(cls: type, hints: list[Any], decoders: list[tuple[Decoder, str]], decode: Decoder) -> Decoder:
    """Generate a ``decode`` with inlined checks of simple fields, as ``dataclasses`` generates methods: twice as fast.

    Values that fail a check and fields of other types go to their decoder; records of another length to ``decode``.
    """
    names = [f"f{number}" for number in range(len(hints))]
    lines = ["def fast(value, path):", f" if type(value) is not list or len(value) != {len(names)}:"]
    lines += ["  return decode(value, path)", f" [{', '.join(names)}] = value"]
    known: dict[str, Any] = {"make": maker(cls), "decode": decode}
    for name, hint, (decoder, where) in zip(names, hints, decoders, strict=True):
        choices = typing.get_args(hint) if typing.get_origin(hint) is types.UnionType else (hint,)
        wrong = [_WRONG.get(one, "True") for one in choices if one is not type(None)]
        wrong += ["{x} is not None"] * (type(None) in choices)
        lines.append(f" if {' and '.join(f'({one})' for one in wrong).format(x=name)}:")
        lines.append(f"  {name} = d_{name}({name}, {where!r})")
        known[f"d_{name}"] = decoder
    lines.append(f" return make({', '.join(names)})")
    exec("\n".join(lines), known)  # noqa: S102 - built from our own dataclasses when this module is imported
    fast: Decoder = known["fast"]
    return fast


def _decoder(hint: Any, name: str) -> Decoder:
    if hint is bool:
        return _is(bool, "a boolean")
    if hint is int:
        return _whole
    if hint is float:
        return _real
    if hint is str:
        return _text
    if hint == Sentence:
        return _sentence
    if hint is object:
        return _data
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return _union(list(typing.get_args(hint)), name)
    if typing.get_origin(hint) is tuple:
        item, ellipsis = typing.get_args(hint)
        if ellipsis is not Ellipsis:
            raise TypeError(f"{name}: only tuple[X, ...] can be encoded")
        return _sequence(item, name)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _record(hint, hint.__name__)
    raise TypeError(f"{name}: {hint!r} cannot be encoded")


_FIELDS: dict[type, Callable[[Any], Sequence[Any]]] = {}
"""Reader of the fields of each dataclass that was encoded so far."""
_DECODERS: dict[str, Decoder] = {}
for _kind in (
    *typing.get_args(ToLighthouse),
    *typing.get_args(ToWorker),
    *typing.get_args(WithinGroup),
):
    _DECODERS[_kind.kind] = _record(_kind, _kind.kind)
_INFO = _record(MemberInfo, "info")


def _plain(value: Any) -> Sequence[Any]:
    """Return the fields of a dataclass in order; called by msgpack for types that it does not know."""
    read = _FIELDS.get(type(value))
    if read is None:
        if not dataclasses.is_dataclass(value):
            raise TypeError(f"{type(value).__name__} cannot be encoded in a message; use plain msgpack values")
        read = _FIELDS[type(value)] = _reader([f.name for f in dataclasses.fields(value)])
    return read(value)


def _reader(names: list[str]) -> Callable[[Any], Sequence[Any]]:
    """Return a function that reads these fields. ``attrgetter`` is twice as fast, but returns one field bare."""
    return attrgetter(*names) if len(names) > 1 else lambda value: [getattr(value, name) for name in names]


def pack(value: Any) -> bytes:
    """Encode any msgpack value; dataclasses become lists of their fields."""
    packed: bytes = msgpack.Packer(default=_plain, buf_size=PACK_BUFFER_BYTES).pack(value)
    return packed


def unpack(frame: bytes | memoryview, limit_bytes: int = MAX_FRAME_BYTES) -> Any:
    """Decode one msgpack value. Raises ``ProtocolError`` if ``frame`` is not one, or is too large."""
    if len(frame) > limit_bytes:
        raise ProtocolError(f"frame too large: {len(frame)} bytes (limit {limit_bytes})")
    try:
        # msgpack allocates a list by the length in its header, so nested headers could cost far more than their bytes.
        return msgpack.unpackb(frame, strict_map_key=False, max_array_len=MAX_ITEMS, max_map_len=MAX_ITEMS)
    except (ValueError, TypeError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise ProtocolError(f"frame is not msgpack: {str(error) or type(error).__name__}") from error


def encode(message: Message) -> bytes:
    return pack([message.kind, *_plain(message)])


def decode(frame: bytes | memoryview, limit_bytes: int = MAX_FRAME_BYTES) -> Message:
    """Decode a message. Raises ``ProtocolError``, which names the field, if ``frame`` is invalid."""
    value = unpack(frame, limit_bytes)
    if type(value) is not list or not value or type(value[0]) is not str:
        raise ProtocolError("invalid frame: expected a list that starts with the kind of the message")
    decoder = _DECODERS.get(value[0])
    if decoder is None:
        raise ProtocolError(
            f"unknown kind of message {value[0][:40]!r}; this build supports version {PROTOCOL_VERSION}"
        )
    message: Message = decoder(value[1:], value[0])
    return message


def check_info(info: MemberInfo) -> None:
    """Raise ``ProtocolError`` or ``TypeError`` if a lighthouse would refuse ``info``."""
    _INFO(unpack(pack(info), MAX_FRAME_BYTES), "info")


def answer_frames(answer: QuorumAnswer | RankQuorum) -> Callable[[int], bytes]:
    """Return a function that encodes ``answer`` for a request number, each once. Other fields are encoded once in all.

    The numbers are equal in most groups of a job, and in all ranks of a group.
    """
    encoded = pack([answer.kind, 0, *_plain(answer)[1:]])
    # an array of up to 15 fields and a string of up to 31 characters have a header of one byte, 0 is one byte
    end = 1 + 1 + len(answer.kind)
    head, tail = encoded[:end], encoded[end + 1 :]
    frames: dict[int, bytes] = {}

    def frame(request: int) -> bytes:
        made = frames.get(request)
        if made is None:
            made = frames[request] = head + pack(request) + tail
        return made

    return frame


def check_version(hello: Hello) -> None:
    """Raise ``VersionError``, which names the side to update, if this lighthouse does not support the worker."""
    if hello.version < OLDEST_PROTOCOL_VERSION:
        raise VersionError(
            f"the worker{_of(hello.library)} speaks protocol {hello.version}, this lighthouse needs at least "
            f"{OLDEST_PROTOCOL_VERSION}: update keepstep in the training environment"
        )
    if hello.oldest_version > PROTOCOL_VERSION:
        raise VersionError(
            f"the worker{_of(hello.library)} needs at least protocol {hello.oldest_version}, this lighthouse speaks "
            f"{PROTOCOL_VERSION}: update the lighthouses first"
        )


def _of(library: str) -> str:
    return f" ({library[:MAX_LIBRARY]})" if library else ""


def check_welcome(welcome: Welcome, *, standby: bool) -> None:
    """Raise ``VersionError`` if this worker does not support the lighthouse. ``standby``: as in its hello."""
    needs = RETRY_VERSION if standby else OLDEST_PROTOCOL_VERSION
    if welcome.version < needs:
        raise VersionError(
            f"the lighthouse speaks protocol {welcome.version}, this {'spare' if standby else 'worker'} needs at least "
            f"{needs}: update the lighthouses first"
        )
