"""Answers that are bytes: sent from where they lie, and only to who takes them in time."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from aiohttp import hdrs, web

from keepstep_mesh.config.logging import get_logger
from keepstep_relay.api.requests import RAW

FIRST_BYTES = 16 << 10
"""The header is copied together with the first bytes that are written; what comes after them is not."""

log = get_logger("keepstep.relay.answers")


class TooSlowError(ConnectionError):
    """Its connection is cut."""


async def begin(request: web.Request, status: int, length: int, headers: Mapping[str, str]) -> web.StreamResponse:
    response = web.StreamResponse(status=status, headers={**headers, hdrs.CONTENT_TYPE: RAW})
    response.content_length = length
    await response.prepare(request)
    return response


async def send(request: web.Request, response: web.StreamResponse, data: memoryview, seconds: float) -> None:
    """Raises ``TooSlowError`` when it is not taken within ``seconds``."""
    try:
        async with asyncio.timeout(seconds):
            await response.write(data[:FIRST_BYTES])
            await response.write(data[FIRST_BYTES:])
    except TimeoutError:
        log.warning("cut off a reader that was too slow", peer=request.remote, seconds=seconds)
        cut(request)
        raise TooSlowError("cut off") from None


def cut(request: web.Request) -> ConnectionError:
    """Ends the connection: what is to be raised then."""
    if request.transport is not None:
        request.transport.abort()
    return ConnectionResetError("cut off")
