"""Writes the answers of the checkpoint server. Bodies are sent from their own memory, without a copy."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import struct
import termios
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus

from keepstep.connection.http_connection import QUEUE_FIELD
from keepstep.connection.rate_limiter import RateLimiter

SHORT_BYTES = 64 << 10
"""Shorter parts of a chunk are sent together."""
PIECE_BYTES = 1 << 20
"""Largest piece of a body. The progress of a reader is known after each piece."""
SMALL_BYTES = 64 << 10
"""Size of a piece for a slow reader, or with a bandwidth limit."""

UNREAD_BYTES = 256 << 10
DRAIN_POLL_SECONDS = 0.002


class ResponseWriter:
    """Writes answers to non-blocking sockets.

    Args:
        loop: the event loop that calls the methods.
        timeout: longest time for a reader to read one piece, in seconds.
        limiter: bandwidth limit of all readers together.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, timeout: float, limiter: RateLimiter) -> None:
        self._loop = loop
        self._timeout = timeout
        self._limiter = limiter if limiter.limited else None

    async def send_head(
        self, connection: socket.socket, status: int, length: int, line: str = "", body: bytes = b""
    ) -> None:
        """Send the head of an answer, with an optional header line and a short body."""
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", "Server: keepstep", f"Content-Length: {length}"]
        lines += [line] if line else []
        async with asyncio.timeout(self._timeout):
            await self._loop.sock_sendall(connection, "\r\n".join([*lines, "", ""]).encode() + body)

    async def send_queue_report(self, connection: socket.socket, ahead: int) -> None:
        """Report that the request waits behind ``ahead`` other readers."""
        async with asyncio.timeout(self._timeout):
            await self._loop.sock_sendall(
                connection, f"HTTP/1.1 102 Processing\r\n{QUEUE_FIELD}: {ahead}\r\n\r\n".encode()
            )

    async def send_in_pieces(
        self, connection: socket.socket, data: bytes | memoryview, on_progress: Callable[[float], None]
    ) -> None:
        """Send ``data`` in pieces, small ones if the reader is slow.

        Args:
            on_progress: called with the time after each piece.
        """
        start, size, now = 0, PIECE_BYTES // 4, self._loop.time()
        while start < len(data):
            async with asyncio.timeout(self._timeout):
                await self._send(connection, data[start : start + size])
            start, began, now = start + size, now, self._loop.time()
            is_quick = now - began < self._timeout / 16
            size = min(2 * size, PIECE_BYTES) if is_quick else max(size // 2, SMALL_BYTES)
            on_progress(now)

    async def drain(self, connection: socket.socket, seconds: float) -> None:
        """Wait, at most ``seconds``, until the reader has all but ``UNREAD_BYTES``.

        The kernel takes megabytes that wait for the line, and does not announce when they are gone.
        """
        end = self._loop.time() + seconds
        while _unread(connection) > UNREAD_BYTES and self._loop.time() < end:  # noqa: ASYNC110
            await asyncio.sleep(DRAIN_POLL_SECONDS)

    async def _send(self, connection: socket.socket, data: bytes | memoryview) -> None:
        """Send ``data``, no faster than the bandwidth limit."""
        if self._limiter is None:
            await self._loop.sock_sendall(connection, data)
            return
        for start in range(0, len(data), SMALL_BYTES):
            piece = data[start : start + SMALL_BYTES]
            if delay := self._limiter.delay(len(piece), time.monotonic()):
                await asyncio.sleep(delay)
            await self._loop.sock_sendall(connection, piece)


def _unread(connection: socket.socket) -> int:
    """Return the bytes that were sent and that the peer has not confirmed."""
    (size,) = struct.unpack("i", fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))
    return int(size)


def join_short(parts: list[memoryview]) -> Iterator[bytes | memoryview]:
    """Yield the bytes of ``parts``, with short parts joined."""
    short = bytearray()
    for part in parts:
        if part.nbytes < SHORT_BYTES:
            short += part
        if short and (part.nbytes >= SHORT_BYTES or len(short) >= 16 * SHORT_BYTES):
            yield bytes(short)
            short.clear()
        if part.nbytes >= SHORT_BYTES:
            yield part
    if short:
        yield bytes(short)
