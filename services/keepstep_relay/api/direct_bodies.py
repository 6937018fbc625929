"""Receive the bodies of chunks straight into their memory: aiohttp would copy every byte three times.

``DirectBodies`` stands between a connection and aiohttp's protocol, and passes on all bytes but these bodies. In the
head of such a request, ``Content-Length`` becomes ``Keepstep-Body``, so that aiohttp expects no body; the handler gets
it from ``body_of``. After a request that has another field of ``_FRAMING``, or several, all bytes are aiohttp's.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Callable
from http import HTTPStatus
from typing import cast

import xxhash
from aiohttp import web
from aiohttp.typedefs import Handler

from keepstep_mesh.net.http import Problem
from keepstep_mesh.protocol.manifest import CHUNK_BYTES
from keepstep_mesh.serving.open_port import LINGER_SECONDS
from keepstep_mesh.serving.rest import bad

BODY = "Keepstep-Body"
"""Its value is the number of the body on this connection."""
MAX_HEAD_BYTES = 16 << 10
READ_BYTES = 64 << 10
"""Of one read of anything else."""
LEAST_BYTES = 512 << 10
"""The kernel reports bytes of a body when so many are there: few wake-ups, and they are hashed in the cache."""
_PUT = b"PUT /v1/chunks/"
_HEAD_END = b"\r\n\r\n"
_FRAMING = re.compile(
    rb"(?i)\r\n(content-length|transfer-encoding|upgrade|expect|" + BODY.lower().encode() + rb"):[ \t]*([^\r\n]*)"
)
"""aiohttp may answer a request with ``Expect`` before any handler, and then nothing would drop its body."""
Accept = Callable[[], asyncio.BaseProtocol]
_NUMBER = re.compile(rb"[0-9]{1,15}")


class Body:
    """The body of one request that aiohttp does not see. ``length``: its bytes, at least one."""

    def __init__(self, connection: DirectBodies, length: int) -> None:
        self.length = length
        self.unread = length
        """Bytes that the connection has not read."""
        self.dropped = False
        self._connection = connection
        self._early = b""
        """Bytes that were read before ``receive``."""
        self._hasher = xxhash.xxh3_128()
        self._rest: memoryview | None = None
        self._done: asyncio.Future[None] | None = None

    async def receive(self, data: memoryview, seconds: float) -> bytes:
        """Fill ``data``, which has ``length`` bytes, and return its digest.

        Raises:
            Problem: 408: it takes longer than ``seconds``; 400: the connection has ended before.
        """
        self._done = asyncio.get_running_loop().create_future()
        self._rest = data
        try:
            self._fill(self._early)
            self._connection.look_at_body()
            async with asyncio.timeout(seconds):
                await self._done
        except TimeoutError:
            done = f"{self.length - self.unread} of {self.length} bytes in {seconds:g} s"
            raise Problem(HTTPStatus.REQUEST_TIMEOUT, f"body too slow: {done}") from None
        except ConnectionError as error:
            raise bad(f"incomplete body: {self.length - self.unread} of {self.length} bytes: {error}") from error
        finally:
            self._rest = None
            self._connection.look_at_body()
        return self._hasher.digest()

    def drop(self) -> None:
        """Ignore the bytes that nothing has received."""
        self.dropped, self._early = True, b""

    # ---- for the connection

    @property
    def room(self) -> memoryview | None:
        """Memory for the next bytes. None: nothing receives them now."""
        return self._rest

    def filled(self, size: int) -> None:
        """Count bytes that were read into ``room``."""
        assert self._rest is not None
        self.unread -= size
        self._hasher.update(self._rest[:size])
        self._rest = self._rest[size:]
        self._check_done()

    def add(self, data: bytes) -> None:
        """Keep bytes that were read elsewhere."""
        self.unread -= len(data)
        if self._rest is not None:
            self._fill(data)
        elif not self.dropped:
            self._early += data

    def _fill(self, data: bytes) -> None:
        assert self._rest is not None
        self._rest[: len(data)] = data
        self._hasher.update(data)
        self._rest = self._rest[len(data) :]
        self._check_done()

    def _check_done(self) -> None:
        if self._done is not None and not self.unread and not self._done.done():
            self._done.set_result(None)

    def lost(self) -> None:
        """End ``receive``: the connection brings no more."""
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionResetError("the connection has ended"))


class DirectBodies(asyncio.BufferedProtocol):
    """The protocol of one connection.

    Args:
        inner: aiohttp's.
        scratch: ``READ_BYTES`` for reads of anything else. The connections of one event loop share it.
    """

    def __init__(self, inner: asyncio.Protocol, scratch: memoryview) -> None:
        self._inner = inner
        self._scratch = scratch
        self._transport: asyncio.Transport
        self._head = b""
        """The part of the head of the current request that arrived so far."""
        self._given = 0
        """Bytes of ``_head`` that aiohttp has."""
        self._others = 0
        """Bytes of the current body that are still aiohttp's."""
        self._all_others = False
        """Whether all bytes are aiohttp's from now on."""
        self._body: Body | None = None
        """Whose bytes come next."""
        self.bodies: dict[str, Body] = {}
        """Bodies of requests that are not answered yet, by their number."""
        self._count = 0
        self._socket: socket.socket | None = None
        """None: its bytes are not those of the body (TLS)."""
        self._least = 1
        self._paused = False
        self._ended = False

    # ---- events of the connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        if transport.get_extra_info("sslcontext") is None:
            self._socket = transport.get_extra_info("socket")
        self._inner.connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()
        self._inner.connection_lost(exc)

    def eof_received(self) -> bool | None:
        self._end()
        return self._inner.eof_received()

    def pause_writing(self) -> None:
        self._inner.pause_writing()

    def resume_writing(self) -> None:
        self._inner.resume_writing()

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002
        room = None if self._body is None else self._body.room
        return self._scratch if room is None else room

    def buffer_updated(self, nbytes: int) -> None:
        if self._body is not None and self._body.room is not None:
            self._body.filled(nbytes)
        else:
            data = bytes(self._scratch[:nbytes])
            while data:
                data = self._take(data)
        self.look_at_body()

    def _end(self) -> None:
        self._ended = True
        if self._body is not None:
            self._body.lost()

    # ---- requests

    def _take(self, data: bytes) -> bytes:
        """Take the first bytes of ``data``, and return the rest."""
        if self._all_others:
            self._inner.data_received(data)
            return b""
        if self._body is not None:
            size = self._body.unread
            self._body.add(data[:size])
            if not self._body.unread:
                self._body = None
            return data[size:]
        if self._others:
            size = min(self._others, len(data))
            self._others -= size
            self._inner.data_received(data[:size])
            return data[size:]
        return self._take_head(data)

    def _take_head(self, data: bytes) -> bytes:
        head = self._head + data
        end = head.find(_HEAD_END) + len(_HEAD_END)
        if end < len(_HEAD_END):
            self._head = head
            self._all_others = len(head) > MAX_HEAD_BYTES
            if self._all_others or not (head.startswith(_PUT) or _PUT.startswith(head)):
                self._give(head)
            return b""
        head, rest = head[:end], head[end:]
        framing = _FRAMING.findall(head)
        if not framing:
            self._give(head)
        elif len(framing) > 1 or framing[0][0].lower() != b"content-length" or not _NUMBER.fullmatch(framing[0][1]):
            self._all_others = True
            self._give(head)
        elif not head.startswith(_PUT) or not 0 < int(framing[0][1]) <= CHUNK_BYTES:
            self._others = int(framing[0][1])
            self._give(head)
        else:
            self._count += 1
            self._body = self.bodies[str(self._count)] = Body(self, int(framing[0][1]))
            self._give(_FRAMING.sub(f"\r\n{BODY}: {self._count}".encode(), head))
        self._head, self._given = b"", 0
        return rest

    def _give(self, head: bytes) -> None:
        if len(head) > self._given:
            self._inner.data_received(head[self._given :])
            self._given = len(head)

    def look_at_body(self) -> None:
        """Read on, unless the handler of the body that comes next has not asked for it yet."""
        body = self._body
        if body is not None and not body.unread:
            body = self._body = None
        if body is not None and self._ended:
            body.lost()
            return
        is_read = body is not None and body.room is not None
        self._report_from(min(LEAST_BYTES, body.unread) if body is not None and is_read else 1)
        if body is not None and not is_read and not body.dropped:
            self._paused = True
            self._transport.pause_reading()  # also if aiohttp has resumed it
        elif self._paused:
            self._paused = False
            self._transport.resume_reading()

    def _report_from(self, size: int) -> None:
        if size != self._least and self._socket is not None and not self._transport.is_closing():
            self._least = size
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, size)

    def answered(self, number: str) -> None:
        """Read what is left of a body, and drop it. Close the connection if that takes too long."""
        body = self.bodies.pop(number, None)
        if body is None or not body.unread or self._ended:
            return
        body.drop()
        self.look_at_body()
        asyncio.get_running_loop().call_later(LINGER_SECONDS, self._close_with, body)

    def _close_with(self, body: Body) -> None:
        if self._body is body:
            self._transport.close()


def _connection(request: web.BaseRequest) -> DirectBodies | None:
    found = None if request.transport is None else request.transport.get_protocol()
    return found if isinstance(found, DirectBodies) else None


def body_of(request: web.BaseRequest) -> Body | None:
    """Return the body of a request. None: aiohttp has it."""
    connection = _connection(request)
    return None if connection is None else connection.bodies.get(request.headers.get(BODY, ""))


@web.middleware
async def drop_unread(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Drop the bytes of a body that its handler did not receive."""
    try:
        return await handler(request)
    finally:
        if BODY in request.headers and (connection := _connection(request)) is not None:
            connection.answered(request.headers[BODY])


def direct(accept: Accept) -> Accept:
    """Return the protocol factory of a port, around that of aiohttp."""
    scratch = memoryview(bytearray(READ_BYTES))
    return lambda: DirectBodies(cast("asyncio.Protocol", accept()), scratch)
