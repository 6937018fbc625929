"""WebSocket frames straight from the transport, for sessions.

aiohttp does what is rare: HTTP, the upgrade, TLS, the authorization in front of it. Once the upgrade is answered a
``Link`` takes the place of aiohttp's protocol on the same transport (``transport.set_protocol``), so that a frame is
handled inside the read callback of the loop. aiohttp's own reader puts every frame into a queue and wakes a task for
it: 1.3 to 2.5 times the time of a quorum round. The wire is plain RFC 6455 without extensions: any WebSocket client can
open a session.

Usage: ``connect`` (worker) or ``accept`` (lighthouse, group server), then ``send``, from the thread of the event loop
only.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
from collections.abc import Callable

import aiohttp
from aiohttp import hdrs, web

from keepstep_mesh.errors import ProtocolError

_ACCEPT_KEY = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
"""RFC 6455 section 1.3."""

_CONTINUATION, _TEXT, _BINARY, _CLOSE, _PING, _PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
_FIN = 0x80
_MASKED = 0x80
_SMALL = 126
_NO_MASK = b"\0\0\0\0"
_PLAIN_HEADS = [bytes((_FIN | _BINARY, size)) for size in range(_SMALL)]
_MASKED_HEADS = [bytes((_FIN | _BINARY, _MASKED | size)) + _NO_MASK for size in range(_SMALL)]
"""Headers of whole small messages by their size; nearly all messages are such."""

CLOSE_NORMAL = 1000
CLOSE_GOING_AWAY = 1001
CLOSE_PROTOCOL_ERROR = 1002
CLOSE_UNSUPPORTED = 1003
CLOSE_TOO_BIG = 1009


class Link(asyncio.Protocol):
    """One WebSocket: whole binary messages in, whole binary messages out.

    ``on_frame`` is called with each message, ``on_lost`` exactly once, with the reason. Neither may block.
    ``limit_bytes`` bounds a message from the peer (more: the connection is closed with 1009) and ``unsent_bytes`` what
    waits for a peer that does not read (more: the connection is aborted).
    """

    __slots__ = (
        "_buffer",
        "_client",
        "_fragments",
        "_fragments_size",
        "_heads_in",
        "_heads_out",
        "_limit_bytes",
        "_lost_reason",
        "_on_frame",
        "_on_lost",
        "_paused",
        "_previous",
        "_transport",
        "_unsent_bytes",
        "closed",
        "last_received",
        "loop",
    )

    def __init__(
        self,
        on_frame: Callable[[bytes], None],
        on_lost: Callable[[str], None],
        *,
        limit_bytes: int,
        unsent_bytes: int,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[str] = self.loop.create_future()
        """Done when the connection is gone; the reason."""
        self.last_received = self.loop.time()
        """Loop time of the last bytes from the peer."""
        self._client = False
        self._heads_in, self._heads_out = _MASKED_HEADS, _PLAIN_HEADS
        self._limit_bytes = limit_bytes
        self._unsent_bytes = unsent_bytes
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._buffer = bytearray()
        self._fragments: list[bytes] = []
        self._fragments_size = 0
        self._paused = False
        self._lost_reason = ""
        self._transport: asyncio.Transport
        self._previous: asyncio.BaseProtocol

    async def connect(self, http: aiohttp.ClientSession, url: str) -> None:
        """Opens a WebSocket to ``url``. ``http`` must stay open as long as the link.

        Raises ``aiohttp.ClientError`` or ``OSError`` without an answer, ``UpgradeError`` if the answer is no upgrade.
        """
        key = base64.b64encode(os.urandom(16)).decode()
        upgrade: dict[str, str] = {hdrs.UPGRADE: "websocket", hdrs.CONNECTION: "Upgrade"}
        upgrade |= {hdrs.SEC_WEBSOCKET_VERSION: "13", hdrs.SEC_WEBSOCKET_KEY: key}
        response = await http.get(url, headers=upgrade, read_until_eof=False, allow_redirects=False)
        try:
            self._take_over(await _upgraded(response, key), client=True)
        except BaseException:
            response.close()
            raise
        # A response that is forgotten closes its connection, so the link keeps it.
        self.closed.add_done_callback(lambda _: response.close())

    async def accept(self, request: web.Request) -> web.StreamResponse:
        """Answers an upgrade; the handler then awaits ``closed`` and returns the response.

        Raises ``web.HTTPBadRequest`` for a request that is no upgrade.
        """
        response = web.WebSocketResponse(compress=False)
        await response.prepare(request)
        if request.transport is None:
            raise ConnectionResetError("the connection ended during the upgrade")
        self._take_over(request.transport, client=False)
        return response

    def _take_over(self, transport: asyncio.Transport, *, client: bool) -> None:
        self._client = client
        if client:
            self._heads_in, self._heads_out = _PLAIN_HEADS, _MASKED_HEADS
        self._transport = transport
        self._previous = transport.get_protocol()
        transport.set_protocol(self)

    # ---- out

    def send(self, message: bytes) -> None:
        """Sends one binary message. Does nothing once the connection is closing: ``on_lost`` tells."""
        size = len(message)
        if size < _SMALL and not self._paused:
            if not self._transport.is_closing():
                self._transport.write(self._heads_out[size] + message)
        else:
            self._send_frame(_BINARY, message)

    def ping(self) -> None:
        """Ask for a sign of life, which updates ``last_received``."""
        self._send_frame(_PING, b"")

    def close(self, code: int = CLOSE_NORMAL, reason: str = "closed here") -> None:
        """Send the unsent frames and a close frame, then end the connection. Both sides get ``reason``.

        With asyncio's TLS, unsent data is dropped if the peer sends something before.
        """
        if not self._transport.is_closing():
            self._send_frame(_CLOSE, code.to_bytes(2, "big") + reason.encode()[:100])
            self._lost_reason = self._lost_reason or reason
            self._transport.close()

    def abort(self, reason: str) -> None:
        """Ends the connection at once and drops what is unsent."""
        self._lost_reason = self._lost_reason or reason
        self._transport.abort()

    def _send_frame(self, opcode: int, payload: bytes) -> None:
        if self._transport.is_closing():
            return
        size = len(payload)
        masked = _MASKED if self._client else 0
        if size < _SMALL:
            head = bytes((_FIN | opcode, masked | size))
        elif size < 1 << 16:
            head = bytes((_FIN | opcode, masked | 126, size >> 8, size & 0xFF))
        else:
            head = bytes((_FIN | opcode, masked | 127)) + size.to_bytes(8, "big")
        # Masks protect proxies from scripts in browsers (RFC 6455 10.3). This client runs no scripts: the key is zero,
        # and masking with it changes nothing.
        self._transport.write(head + _NO_MASK + payload if masked else head + payload)
        if self._paused and self._transport.get_write_buffer_size() > self._unsent_bytes:
            self.abort(f"the peer does not read: more than {self._unsent_bytes} bytes wait for it")

    # ---- in: what asyncio calls

    def data_received(self, data: bytes) -> None:
        self.last_received = self.loop.time()
        start = 2 if self._client else 6
        size = len(data) - start
        if 0 < size < _SMALL and data.startswith(self._heads_in[size]) and not self._buffer and not self._fragments:
            self._on_frame(data[start:])  # nearly always: exactly one small message
            return
        self._buffer += data
        try:
            while not self._transport.is_closing() and self._take_frame():
                pass
        except ProtocolError as error:
            too_big = isinstance(error, _TooBigError)
            self.close(CLOSE_TOO_BIG if too_big else CLOSE_PROTOCOL_ERROR, f"bad frame: {error}")

    def eof_received(self) -> None:
        self._lost_reason = self._lost_reason or "the peer closed the connection"

    def pause_writing(self) -> None:
        self._paused = True

    def resume_writing(self) -> None:
        self._paused = False

    def connection_lost(self, exc: Exception | None) -> None:
        reason = self._lost_reason or (f"{exc or type(exc).__name__}" if exc else "the connection ended")
        # aiohttp keeps books on its connections; it has to hear of the end.
        self._previous.connection_lost(exc)
        if not self.closed.done():
            self.closed.set_result(reason)
            self._on_lost(reason)

    # ---- frames

    def _take_frame(self) -> bool:
        """Handles the first frame of the buffer. False when it is not complete yet."""
        buffer = self._buffer
        if len(buffer) < 2:
            return False
        first, second = buffer[0], buffer[1]
        opcode = first & 0x0F
        if first & 0x70:
            raise ProtocolError("reserved bits are set; no extension was agreed")
        if bool(second & _MASKED) == self._client:
            raise ProtocolError("frames of a client are masked, frames of a server are not")
        size, start = second & 0x7F, 2
        if opcode >= _CLOSE and (size > 125 or not first & _FIN):
            raise ProtocolError("control frames are short and whole")
        if size == 126:
            start = 4
            size = int.from_bytes(buffer[2:4], "big")
        elif size == 127:
            start = 10
            size = int.from_bytes(buffer[2:10], "big")
        if len(buffer) < start:
            return False
        if size + self._fragments_size > self._limit_bytes:
            raise _TooBigError(f"message too large: at least {size} bytes (limit {self._limit_bytes})")
        mask = b""
        if not self._client:
            mask = bytes(buffer[start : start + 4])
            start += 4
        if len(buffer) < start + size:
            return False
        payload = bytes(memoryview(buffer)[start : start + size])
        del buffer[: start + size]
        if mask and mask != _NO_MASK:
            payload = _unmask(payload, mask)
        self._handle_frame(opcode, bool(first & _FIN), payload)
        return True

    def _handle_frame(self, opcode: int, fin: bool, payload: bytes) -> None:
        if opcode in (_BINARY, _CONTINUATION):
            if (opcode == _CONTINUATION) != bool(self._fragments):
                raise ProtocolError("fragments of a message out of order")
            if fin and not self._fragments:
                self._on_frame(payload)
                return
            self._fragments.append(payload)
            # Empty fragments cost memory too.
            self._fragments_size += len(payload) + 64
            if fin:
                whole = b"".join(self._fragments)
                self._fragments.clear()
                self._fragments_size = 0
                self._on_frame(whole)
        elif opcode == _PING:
            self._send_frame(_PONG, payload)
        elif opcode == _CLOSE:
            code = int.from_bytes(payload[:2], "big") if len(payload) >= 2 else CLOSE_NORMAL
            reason = payload[2:].decode(errors="replace")
            self._lost_reason = f"closed by the peer: {reason or code}"
            self._send_frame(_CLOSE, payload[:2])
            self._transport.close()
        elif opcode == _TEXT:
            self.close(CLOSE_UNSUPPORTED, "text frames are not understood; send binary ones")
        elif opcode != _PONG:
            raise ProtocolError(f"unknown opcode {opcode}")


class _TooBigError(ProtocolError):
    pass


def _unmask(payload: bytes, mask: bytes) -> bytes:
    size = len(payload)
    key = (mask * (size // 4 + 1))[:size]
    return (int.from_bytes(payload, "little") ^ int.from_bytes(key, "little")).to_bytes(size, "little")


MAX_PROBLEM_BYTES = 64 * 1024


class UpgradeError(ProtocolError):
    """The server refused the WebSocket upgrade. ``said``: its reason; empty: it is not a keepstep service."""

    def __init__(self, status: int, said: str) -> None:
        why = said[:500] or "the server at this address is not a keepstep service"
        super().__init__(f"answers {status} instead of opening a session: {why}")
        self.status = status
        self.said = said


def _what_was_said(body: bytes) -> str:
    """The sentence of a problem document (RFC 9457); of any other answer nothing, it is not for people."""
    try:
        problem = json.loads(body)
        return str(problem.get("detail") or problem["title"])
    except (ValueError, AttributeError, KeyError):
        return ""


async def _upgraded(response: aiohttp.ClientResponse, key: str) -> asyncio.Transport:
    if response.status != 101:
        raise UpgradeError(response.status, _what_was_said(await response.content.read(MAX_PROBLEM_BYTES)))
    # The hash is the protocol's, not a secret's.
    digest = hashlib.sha1(key.encode() + _ACCEPT_KEY, usedforsecurity=False).digest()
    if response.headers.get(hdrs.SEC_WEBSOCKET_ACCEPT) != base64.b64encode(digest).decode():
        raise UpgradeError(response.status, "not a WebSocket: the accept key is wrong")
    if response.connection is None or response.connection.transport is None:
        raise ConnectionResetError("the connection ended during the upgrade")
    return response.connection.transport
