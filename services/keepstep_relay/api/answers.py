"""Send binary answers without a copy, with a deadline for the reader."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from aiohttp import hdrs, web

from keepstep_mesh.config.logging import get_logger
from keepstep_relay.api import frames
from keepstep_relay.api.frames import TooSlowError
from keepstep_relay.api.requests import RAW

FIRST_BYTES = 16 << 10
"""The first write is copied together with the header; later writes are not copied."""

log = get_logger("keepstep.relay.answers")


async def begin(request: web.Request, status: int, length: int, headers: Mapping[str, str]) -> web.StreamResponse:
    headers = {**headers, hdrs.CONTENT_TYPE: RAW}
    if frames.wants_frames(request):
        response = frames.response(status, length, headers)
    else:
        response = web.StreamResponse(status=status, headers=headers)
        response.content_length = length
    await response.prepare(request)
    return response


async def send(request: web.BaseRequest, response: web.StreamResponse, data: memoryview, seconds: float) -> None:
    """Send ``data``. Raises ``TooSlowError`` if the reader does not accept it within ``seconds``."""
    if frames.FRAMES in response.headers:
        await frames.send(request, response, data)
        return
    try:
        async with asyncio.timeout(seconds):
            await response.write(data[:FIRST_BYTES])
            await response.write(data[FIRST_BYTES:])
    except TimeoutError:
        log.warning("closed the connection of a slow reader", peer=request.remote, seconds=seconds)
        cut(request)
        raise TooSlowError("the reader was too slow") from None


def cut(request: web.BaseRequest) -> ConnectionError:
    """Close the connection. Return the error for the caller to raise."""
    if request.transport is not None:
        request.transport.abort()
    return ConnectionResetError("connection closed by the relay")
