"""Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

from aiohttp import hdrs, web

from keepstep_mesh.net.http import Problem
from keepstep_mesh.serving.rest import MAX_DIGITS

SLOW_STREAM_SECONDS = 30.0
"""A connection that accepts nothing for this time is closed."""


def last_event_id(request: web.Request) -> int | None:
    """Return the number in ``Last-Event-ID``, which a browser sends when it reconnects; None: no number."""
    text = request.headers.get("Last-Event-ID", "")
    return int(text) if text.isdecimal() and len(text) <= MAX_DIGITS else None


def message(event: str, data: str, number: int | None = None) -> str:
    """Return one event. ``data``: a single line. ``number``: its ``Last-Event-ID``."""
    head = "" if number is None else f"id: {number}\n"
    return f"{head}event: {event}\ndata: {data}\n\n"


def comment(text: str) -> str:
    """Return a line that clients ignore; it keeps the connection open."""
    return f": {text}\n\n"


class EventStream:
    """One open stream."""

    def __init__(self) -> None:
        self.response = web.StreamResponse(
            headers={hdrs.CONTENT_TYPE: "text/event-stream", hdrs.CACHE_CONTROL: "no-store"}
        )

    async def send(self, text: str) -> None:
        """Send messages. Raises ``TimeoutError`` when the client does not read them in time, ``ConnectionError``."""
        async with asyncio.timeout(SLOW_STREAM_SECONDS):
            await self.response.write(text.encode())


class EventStreams:
    """The open streams of a service. ``limit``: how many may be open."""

    def __init__(self, limit: int) -> None:
        self.count = 0
        self._limit = limit

    @asynccontextmanager
    async def open(self, request: web.Request) -> AsyncIterator[EventStream]:
        """Answer a request with a stream. A broken or stuck connection ends the context without an error.

        Raises:
            Problem: Too many streams are open.
        """
        if self.count >= self._limit:
            reason = f"too many open event streams (limit {self._limit}); retry later"
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, reason, retry_after=10.0)
        stream = EventStream()
        self.count += 1
        try:
            await stream.response.prepare(request)
            yield stream
        except (ConnectionError, TimeoutError):
            if request.transport is not None:
                request.transport.abort()
        finally:
            self.count -= 1
