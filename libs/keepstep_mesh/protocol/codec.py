"""Encode and decode messages. Invalid input raises ``ProtocolError``, which names the message and its field.

A frame is one msgpack array: the kind, then the fields in order. The decoders are generated from the type hints of the
dataclasses. They check types and sizes, and ignore fields appended by a newer peer.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import msgpack

from keepstep_mesh.errors import ProtocolError, VersionError
from keepstep_mesh.protocol.group_messages import RankQuorum, WithinGroup
from keepstep_mesh.protocol.membership import MAX_DATA_BYTES, MemberInfo, Sentence
from keepstep_mesh.protocol.messages import (
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    Hello,
    Quorum,
    ToLighthouse,
    ToWorker,
    Welcome,
)
from keepstep_mesh.protocol.records import Decoder, Format
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


_SIMPLE: dict[Any, Decoder] = {
    bool: _is(bool, "a boolean"),
    int: _whole,
    float: _real,
    str: _text,
    Sentence: _sentence,
    object: _data,
}
_ODD: dict[Any, str] = {
    int: "type({x}) is not int or not 0 <= {x} < 9223372036854775808",
    str: f"type({{x}}) is not str or len({{x}}) > {MAX_TEXT}",
    Sentence: f"type({{x}}) is not str or len({{x}}) > {MAX_TEXT} or not {{x}}.isprintable()",
    bool: "type({x}) is not bool",
    object: "{x} is not None",
}
_FORMAT = Format(ProtocolError, _SIMPLE, _ODD, MAX_ITEMS)


_FIELDS: dict[type, Callable[[Any], Sequence[Any]]] = {}
"""Reader of the fields of each dataclass that was encoded so far."""
_DECODERS: dict[str, Decoder] = {}
for _kind in (
    *typing.get_args(ToLighthouse),
    *typing.get_args(ToWorker),
    *typing.get_args(WithinGroup),
):
    _DECODERS[_kind.kind] = _FORMAT.of_list(_kind, _kind.kind)
_INFO = _FORMAT.of_list(MemberInfo, "info")


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


def answer_frames(answer: Quorum | RankQuorum) -> Callable[[int], bytes]:
    """Return a function that encodes ``answer`` for a request number, each once. Other fields are encoded once in all.

    The numbers are equal in most groups of a job, and in all ranks of a group.
    """
    values = _plain(answer)[1:]
    encoded = pack([answer.kind, 0, *values])
    # the headers of a list take one byte, or three from 16 items on; that of a short string takes one, and so does 0
    end = (1 if len(values) < 14 else 3) + 1 + len(answer.kind)
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


def check_welcome(welcome: Welcome) -> None:
    """Raise ``VersionError`` if this worker does not support the lighthouse."""
    if welcome.version < OLDEST_PROTOCOL_VERSION:
        raise VersionError(
            f"the lighthouse speaks protocol {welcome.version}, this worker needs at least {OLDEST_PROTOCOL_VERSION}: "
            f"update the lighthouses first"
        )
