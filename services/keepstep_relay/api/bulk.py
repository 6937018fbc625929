"""Chunks and packs over HTTP. A body is received straight into the memory tier."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus

from aiohttp import hdrs, web

from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.net.http import Problem, Route
from keepstep_mesh.protocol.manifest import CHUNK_BYTES
from keepstep_mesh.security.tokens import Access
from keepstep_relay.api import answers, requests
from keepstep_relay.core.events import Key, ReadFrom, Table
from keepstep_relay.node import RelayNode
from keepstep_relay.tiers.chunks import ROOM_SECONDS
from keepstep_relay.tiers.disk_tier import DamagedError

MAX_TRANSFERS = 1024
"""Concurrent uploads, and concurrent downloads."""
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")

log = get_logger("keepstep.relay.bulk")


def routes(relay: RelayNode) -> list[Route]:
    here = _Bulk(relay)
    chunk = "/v1/chunks/{digest}"
    return [
        Route("HEAD", chunk, here.has_chunk, Access.READ, "whether the relay has a chunk"),
        Route("GET", chunk, here.get_chunk, Access.READ, "a chunk; with ?wait= also one that is being uploaded"),
        Route("PUT", chunk, here.put_chunk, Access.WORKER, "upload a chunk of a checkpoint"),
        Route(
            "GET",
            "/v1/jobs/{job}/checkpoints/{id}/packs/{rank}",
            here.get_pack,
            Access.READ,
            "the pack of a rank, or a Range of it, as its chunks arrive",
        ),
    ]


class _Bulk:
    def __init__(self, relay: RelayNode) -> None:
        self._relay = relay
        self._traffic = relay.traffic

    async def has_chunk(self, request: web.Request) -> web.StreamResponse:
        digest = requests.digest(request)
        length = self._relay.core.inventory.wanted(digest)
        if length is None or not self._relay.core.inventory.is_here(digest):
            raise Problem(HTTPStatus.NOT_FOUND, f"chunk {digest.hex()} not found")
        return web.Response(headers={hdrs.CONTENT_LENGTH: str(length), hdrs.CONTENT_TYPE: requests.RAW})

    async def get_chunk(self, request: web.Request) -> web.StreamResponse:
        digest = requests.digest(request)
        wait = requests.wait(request, self._relay.settings.max_wait)
        if self._relay.core.inventory.wanted(digest) is None:
            raise Problem(HTTPStatus.NOT_FOUND, f"chunk {digest.hex()} not found: no checkpoint of this relay names it")
        async with self._sending(), self._relay.chunks.reading(digest, wait) as data:
            headers: dict[str, str] = {hdrs.ETAG: f'"{digest.hex()}"', hdrs.CACHE_CONTROL: "immutable"}
            response = await answers.begin(request, HTTPStatus.OK, data.nbytes, headers)
            await self._send(request, response, data)
        return response

    async def put_chunk(self, request: web.Request) -> web.StreamResponse:
        digest = requests.digest(request)
        length = self._relay.core.inventory.wanted(digest)
        if length is None:
            raise Problem(
                HTTPStatus.CONFLICT,
                f"no checkpoint of this relay names chunk {digest.hex()}; send its manifest first",
            )
        requests.check_length(request, length, exactly=True)
        chunks = self._relay.chunks
        if self._relay.core.inventory.is_here(digest):
            await chunks.save(digest)
            self._traffic.deduplicated_bytes += length
            return web.Response(status=HTTPStatus.OK)
        if self._traffic.uploads >= MAX_TRANSFERS:
            raise Problem(
                HTTPStatus.SERVICE_UNAVAILABLE, f"too many uploads (limit {MAX_TRANSFERS}); retry", retry_after=1
            )
        self._traffic.uploads += 1
        try:
            await chunks.memory.reserve(length, ROOM_SECONDS)
            try:
                data = chunks.memory.buffer(length)
                await requests.body(request, data, self._relay.settings.body_timeout)
            except BaseException:
                chunks.memory.release(length)
                raise
            self._traffic.received_bytes += length
            await chunks.put(digest, data)
        except DamagedError as error:
            raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, f"{error}; upload it again") from error
        finally:
            self._traffic.uploads -= 1
        return web.Response(status=HTTPStatus.CREATED)

    async def get_pack(self, request: web.Request) -> web.StreamResponse:
        """Send the pack as its chunks arrive. ``?wait=`` counts for each chunk."""
        key, rank = requests.key(request), requests.rank_in_path(request)
        wait = requests.wait(request, self._relay.settings.max_wait)
        await self._relay.has_manifest(key, rank, wait)
        table = self._relay.core.checkpoint(key).tables[rank]
        first, last = _range(request, table.pack_bytes)
        headers: dict[str, str] = {hdrs.ETAG: f'"{table.root.hex()}"', hdrs.ACCEPT_RANGES: "bytes"}
        status = HTTPStatus.OK
        if hdrs.RANGE in request.headers:
            status = HTTPStatus.PARTIAL_CONTENT
            headers[hdrs.CONTENT_RANGE] = f"bytes {first}-{last}/{table.pack_bytes}"
        if not table.pack_bytes:
            return web.Response(headers=headers)
        return await self._stream(request, key, table, range(first, last + 1), wait, status, headers)

    async def _stream(
        self,
        request: web.Request,
        key: Key,
        table: Table,
        asked: range,
        wait: float,
        status: int,
        headers: dict[str, str],
    ) -> web.StreamResponse:
        response: web.StreamResponse | None = None
        async with self._sending():
            for chunk in range(asked.start // CHUNK_BYTES, (asked.stop - 1) // CHUNK_BYTES + 1):
                start = chunk * CHUNK_BYTES
                try:
                    async with self._relay.chunks.reading(table.digests[chunk], wait) as data:
                        self._relay.chunks.step(ReadFrom(key))
                        if response is None:
                            response = await answers.begin(request, status, len(asked), headers)
                        await self._send(request, response, data[max(0, asked.start - start) : asked.stop - start])
                except ConnectionError:
                    raise
                except Exception as error:
                    if response is None:
                        raise
                    # The status has been sent: a short body is the only way left to report the error.
                    log.warning(
                        "aborted a download of a pack", checkpoint=key.id, chunk=chunk, reason=str(error) or repr(error)
                    )
                    raise answers.cut(request) from error
        if response is None:
            raise RuntimeError("an empty range")
        return response

    async def _send(self, request: web.Request, response: web.StreamResponse, data: memoryview) -> None:
        try:
            await answers.send(request, response, data, self._relay.settings.body_timeout)
        except answers.TooSlowError:
            self._traffic.cut_off += 1
            raise
        self._traffic.sent_bytes += data.nbytes

    @asynccontextmanager
    async def _sending(self) -> AsyncIterator[None]:
        if self._traffic.downloads >= MAX_TRANSFERS:
            raise Problem(
                HTTPStatus.SERVICE_UNAVAILABLE, f"too many downloads (limit {MAX_TRANSFERS}); retry", retry_after=1
            )
        self._traffic.downloads += 1
        try:
            yield
        finally:
            self._traffic.downloads -= 1


def _range(request: web.Request, size: int) -> tuple[int, int]:
    """Return the first and last byte of the requested range. ``Problem`` 416 for an invalid range."""
    text = request.headers.get(hdrs.RANGE)
    if text is None:
        return 0, size - 1
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
    return first, last
