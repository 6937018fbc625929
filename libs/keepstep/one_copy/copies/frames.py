"""Frames on a socket between two ranks: headers in msgpack, and the bytes of states with their digests.

A frame is a length of 4 bytes and a header. A state is a frame that describes it (``content`` of ``keepstep.state``),
its bytes, and a frame with their digests, which are computed while the bytes are sent. So no code of the sender runs,
damaged bytes are refused, and nothing is copied before it is sent.
"""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import msgpack

from keepstep.one_copy.copies.kept_bytes import Memory, Stored, Target, TensorPack, pack_bytes, pack_of, pieces_of
from keepstep.state.pack import Pack
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.net.fork_safety import open_socket
from keepstep_mesh.protocol.manifest import MAX_MANIFEST_BYTES, chunk_digests, cut_pieces, root_digest
from keepstep_mesh.security.tokens import ClientToken

MAX_HEADER_BYTES = MAX_MANIFEST_BYTES + (1 << 20)
MAX_HELLO_BYTES = 1 << 16
"""Limit of the first header, which comes before the token is checked."""
PIECE_BYTES = 4 << 20
"""Bytes that are hashed and sent together, while the cache of a processor has them."""
SKIP_BYTES = 1 << 16
MOST_BUFFERS = 512
"""Of one call of the system; Linux takes 1024."""
_LENGTH = struct.Struct("!I")
_TIMEVAL = struct.Struct("ll")
POLL_SECONDS = 0.2
"""A wait looks this often whether it was ended from outside."""


class CopyError(KeepstepError):
    """A copy could not be sent, kept or read."""


class NoMemoryError(CopyError):
    """The keeper has no memory for a part of a copy."""


class Frames:
    """One connection.

    Args:
        connection: connected; owned by this object.
        ended: returns why waits end early; empty: they go on.
    """

    def __init__(self, connection: socket.socket, ended: Callable[[], str] = lambda: "") -> None:
        self._socket = connection
        # The system ends a wait, and not Python, which would wait before each call and move less in each.
        connection.settimeout(None)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(0, round(POLL_SECONDS * 1e6)))
        self._ended = ended

    def send(self, header: dict[str, Any], *, limit: float) -> None:
        """Send a header.

        Args:
            header: of values of msgpack.
            limit: longest time without progress, seconds.

        Raises:
            CopyError: the connection ended, or the limit passed.
        """
        self.send_bytes([_frame(header)], limit)

    def send_bytes(self, pieces: Sequence[memoryview], limit: float) -> None:
        """Send bytes that lie in several places. CopyError: as ``send``."""
        self._move(pieces, self._socket.sendmsg, limit)

    def receive(self, limit: float, *, most: int = MAX_HEADER_BYTES) -> dict[str, Any]:
        """Return the next header.

        Args:
            limit: longest time without progress, seconds.
            most: limit of its bytes.

        Raises:
            CopyError: the connection ended, the limit passed, or the frame is invalid.
        """
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, limit))
        if length > most:
            raise CopyError(f"header too large: {length} bytes (limit {most})")
        try:
            header: dict[str, Any] = msgpack.unpackb(self._read(length, limit), strict_map_key=False)
        except (ValueError, TypeError, msgpack.exceptions.UnpackException) as error:
            raise CopyError(f"a frame has no valid header: {error}") from error
        if not isinstance(header, dict):
            raise CopyError(f"a header is a {type(header).__name__}; expected a map")
        return header

    def _read(self, size: int, limit: float) -> memoryview:
        data = memoryview(bytearray(size))
        self.fill([data], limit)
        return data

    def fill(self, memory: Sequence[memoryview], limit: float) -> None:
        """Receive as many bytes as ``memory`` has. CopyError: as ``receive``."""

        def received(buffers: Sequence[memoryview]) -> int:
            return self._socket.recvmsg_into(buffers, 0, socket.MSG_WAITALL)[0]

        self._move(memory, received, limit)

    def _move(self, buffers: Sequence[memoryview], move: Callable[[Sequence[memoryview]], int], limit: float) -> None:
        """Send or receive all bytes of ``buffers``."""
        for first in range(0, len(buffers), MOST_BUFFERS):
            rest, last = [one for one in buffers[first : first + MOST_BUFFERS] if one.nbytes], time.monotonic()
            while rest:
                with self._waiting(last + limit):
                    moved = move(rest)
                    if not moved:
                        raise CopyError("the peer has closed the connection")
                    last = time.monotonic()
                    rest = _without(rest, moved)

    @contextlib.contextmanager
    def _waiting(self, deadline: float) -> Iterator[None]:
        try:
            yield
        except BlockingIOError:
            if reason := self._ended():
                raise CopyError(reason) from None
            if time.monotonic() >= deadline:
                raise CopyError("no progress of the peer in time") from None
        except OSError as error:
            raise CopyError(f"the connection has ended: {error}") from error

    def close(self) -> None:
        """End the connection. From any thread."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    # ---- states

    def receive_stored(self, header: dict[str, Any], memory: Memory, limit: float) -> Stored:
        """Return the bytes of the state that follows ``header``.

        Args:
            header: of the state. With ``sealed`` the digests of the sender follow, and the bytes are verified.
            memory: gives the blocks of the result.
            limit: longest time without progress, seconds.

        Raises:
            NoMemoryError: no memory is left. Nothing was received; ``skip_state`` receives the state.
            CopyError: as ``receive``; or the bytes are damaged.
            ManifestError: the description of the state is invalid.
        """
        content = bytes(header["content"])
        size = pack_bytes(content)
        try:
            blocks = memory.take(size)
        except MemoryError as error:
            raise NoMemoryError(f"no memory for {size} bytes") from error
        try:
            digests = self._receive_into(blocks, limit)
            if header["sealed"]:
                self._verify(content, digests, limit)
        except BaseException:
            memory.give_back(blocks)
            raise
        return Stored(content, digests, blocks, memory)

    def skip_state(self, header: dict[str, Any], limit: float) -> None:
        """Receive the state that follows ``header``, and forget it. CopyError: as ``receive``."""
        left, place = pack_bytes(bytes(header["content"])), memoryview(bytearray(SKIP_BYTES))
        while left:
            part = place[: min(left, SKIP_BYTES)]
            self.fill([part], limit)
            left -= part.nbytes
        if header["sealed"]:
            self.receive(limit)

    def receive_state(self, header: dict[str, Any], limit: float) -> Any:
        """Return the state that follows ``header``, verified. Errors as of ``receive_stored``."""
        content = bytes(header["content"])
        target = Target(content)
        self._verify(content, self._receive_into(target.segments, limit), limit)
        return target.result()

    def _receive_into(self, memory: Sequence[memoryview], limit: float) -> bytes:
        """Receive the bytes of a state. Return their digests."""

        def received() -> Iterator[memoryview]:
            for part in cut_pieces(memory, PIECE_BYTES):
                self.fill(part, limit)
                yield from part  # the caller hashes them

        return chunk_digests(received())

    def _verify(self, content: bytes, digests: bytes, limit: float) -> None:
        end = self.receive(limit)
        if end.get("digests") != digests or end.get("root") != root_digest(content, digests):
            raise CopyError("a copy was damaged on its way: its digests are not those of the sender")


def send_state(
    links: Collection[Frames],
    header: dict[str, Any],
    state: Any,
    *,
    limit: float,
    pack: Pack | TensorPack | None = None,
) -> None:
    """Send a state to several ranks, from its own memory.

    Args:
        links: to the ranks.
        header: goes before the state.
        state: tensors on a GPU are copied to main memory piece by piece. It must not change in the meantime.
        limit: longest time without progress of a peer, seconds.
        pack: of the state. Default: it is made.

    Raises:
        CopyError: a connection ended, or the limit passed.
        UnsupportedValue: the state has a value that cannot be stored.
    """
    pack = pack or pack_of(state)
    head = [_frame({**header, "content": pack.content_bytes, "sealed": True})]

    def sent() -> Iterator[memoryview]:
        for part in cut_pieces(pieces_of(pack), PIECE_BYTES):
            yield from part  # the caller hashes them; then they are in the cache
            for link in links:
                link.send_bytes([*head, *part], limit)
            head.clear()

    digests = chunk_digests(sent())
    for link in links if head else ():
        link.send_bytes(head, limit)
    for link in links:
        link.send({"digests": digests, "root": root_digest(pack.content_bytes, digests)}, limit=limit)


def send_unsealed(
    links: Collection[Frames], header: dict[str, Any], packs: Sequence[Pack | TensorPack], *, limit: float
) -> None:
    """Send several states whose digests follow later, with one header.

    Args:
        links: to the ranks.
        header: ``contents`` is added, the descriptions of the states.
        packs: of the states.
        limit: longest time without progress of a peer, seconds.

    Raises:
        CopyError: a connection ended, or the limit passed.
    """
    head = _frame({**header, "contents": [one.content_bytes for one in packs]})
    pieces = itertools.chain([head], *(pieces_of(one) for one in packs))
    for part in cut_pieces(pieces, PIECE_BYTES):
        for link in links:
            link.send_bytes(part, limit)


def connect(address: str, token: ClientToken, limit: float, ended: Callable[[], str] = lambda: "") -> Frames:
    """Connect to the ``CopyServer`` at ``host:port``.

    Raises:
        CopyError: it does not answer within ``limit`` seconds.
    """
    host, _, port = address.rpartition(":")
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        connection = open_socket(family, kind, protocol)
        connection.settimeout(limit)
        try:
            connection.connect(where)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except BaseException:
            connection.close()
            raise
    except (OSError, ValueError) as error:
        raise CopyError(f"{address} does not answer: {error}") from error
    frames = Frames(connection, ended)
    frames.send({"kind": "hello", "authorization": token.peer_headers().get("Authorization", "")}, limit=limit)
    return frames


def _frame(header: dict[str, Any]) -> memoryview:
    packed = msgpack.packb(header)
    return memoryview(_LENGTH.pack(len(packed)) + packed)


def _without(buffers: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return the buffers without their first bytes."""
    for index, one in enumerate(buffers):
        if count < one.nbytes:
            return [one[count:], *buffers[index + 1 :]]
        count -= one.nbytes
    return []
