"""Send bytes of packs: whole, or a range of them, as their chunks arrive."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from http import HTTPStatus

from aiohttp import hdrs, web

from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.net.http import Problem
from keepstep_mesh.protocol.manifest import CHUNK_BYTES
from keepstep_relay.api import answers, frames
from keepstep_relay.core.events import Key, ReadFrom, Table
from keepstep_relay.node import RelayNode

MAX_DOWNLOADS = 1024
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")

log = get_logger("keepstep.relay.downloads")


class Downloads:
    """Sends bytes to readers, and counts them."""

    def __init__(self, relay: RelayNode) -> None:
        self._relay = relay
        self._traffic = relay.traffic

    @asynccontextmanager
    async def counted(self) -> AsyncIterator[None]:
        """Count one download. ``Problem`` 503 beyond ``MAX_DOWNLOADS``."""
        if self._traffic.downloads >= MAX_DOWNLOADS:
            raise Problem(
                HTTPStatus.SERVICE_UNAVAILABLE, f"too many downloads (limit {MAX_DOWNLOADS}); retry", retry_after=1
            )
        self._traffic.downloads += 1
        try:
            yield
        finally:
            self._traffic.downloads -= 1

    async def send(self, request: web.Request, response: web.StreamResponse, data: memoryview) -> None:
        """Send ``data``, and disconnect a reader that is too slow."""
        try:
            await answers.send(request, response, data, self._relay.settings.body_timeout)
        except frames.TooSlowError:
            self._traffic.cut_off += 1
            raise
        self._traffic.sent_bytes += data.nbytes

    async def pack(self, key: Key, table: Table, asked: range, wait: float) -> AsyncGenerator[memoryview]:
        """Yield the bytes ``asked`` of a pack, chunk by chunk. Wait up to ``wait`` seconds for each chunk."""
        if not asked:
            return
        for chunk in range(asked.start // CHUNK_BYTES, (asked.stop - 1) // CHUNK_BYTES + 1):
            start = chunk * CHUNK_BYTES
            async with self._relay.chunks.reading(table.digests[chunk], wait) as data:
                self._relay.chunks.step(ReadFrom(key))
                yield data[max(0, asked.start - start) : asked.stop - start]

    async def answer(
        self,
        request: web.Request,
        parts: AsyncGenerator[memoryview],
        asked: range,
        size: int,
        headers: Mapping[str, str],
        what: str,
    ) -> web.StreamResponse:
        """Send ``parts``, the bytes ``asked`` of ``size``, with status 206 if the request has a Range.

        An error before the first part is raised. After it, the connection is closed: the status has been sent, and a
        short body is the only way left to report the error.
        """
        status, headers = HTTPStatus.OK, {**headers, hdrs.ACCEPT_RANGES: "bytes"}
        if hdrs.RANGE in request.headers:
            status = HTTPStatus.PARTIAL_CONTENT
            headers[hdrs.CONTENT_RANGE] = f"bytes {asked.start}-{asked.stop - 1}/{size}"
        if not asked:
            return web.Response(headers=headers)
        response: web.StreamResponse | None = None
        async with self.counted(), aclosing(parts):
            try:
                async for part in parts:
                    if response is None:
                        response = await answers.begin(request, status, len(asked), headers)
                    await self.send(request, response, part)
            except ConnectionError:
                raise
            except Exception as error:
                if response is None:
                    raise
                log.warning("aborted a download", what=what, reason=str(error) or repr(error))
                raise answers.cut(request) from error
        if response is None:
            raise RuntimeError("an empty download")
        return response


def asked_range(request: web.Request, size: int) -> range:
    """Return the range of bytes that a request wants. ``Problem`` 416 for an invalid range."""
    text = request.headers.get(hdrs.RANGE)
    if text is None:
        return range(size)
    matched = _RANGE.fullmatch(text)
    one, other = matched.groups() if matched else ("", "")
    if one:
        first, last = int(one), min(int(other), size - 1) if other else size - 1
    else:  # a suffix: the last N bytes
        first, last = max(0, size - int(other or 0)), size - 1
    if not 0 <= first <= last < size:
        raise Problem(
            HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
            f"invalid range {text[:80]!r}: expected one bytes=<first>-<last> within {size} bytes",
        )
    return range(first, last + 1)
