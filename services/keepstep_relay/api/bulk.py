"""Chunks and packs over HTTP: the bulk path. A body goes once into the memory in which it stays."""

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
"""Chunks that are sent or received at the same time."""
_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})")

log = get_logger("keepstep.relay.bulk")


def routes(relay: RelayNode) -> list[Route]:
    here = _Bulk(relay)
    chunk = "/v1/chunks/{digest}"
    return [
        Route("HEAD", chunk, here.has_chunk, Access.READ, "whether a chunk is here"),
        Route("GET", chunk, here.get_chunk, Access.READ, "a chunk; ?wait= for one that is to come"),
        Route("PUT", chunk, here.put_chunk, Access.WORKER, "upload a chunk that a checkpoint needs"),
        Route(
            "GET",
            "/v1/jobs/{job}/checkpoints/{id}/packs/{rank}",
            here.get_pack,
            Access.READ,
            "the bytes of one rank, or a Range of them, as they come",
        ),
    ]


class _Bulk:
    def __init__(self, relay: RelayNode) -> None:
        self._relay = relay
        self._traffic = relay.traffic

    async def has_chunk(self, request: web.Request) -> web.StreamResponse:
        digest = requests.digest(request)
        length = self._relay.core.wanted(digest)
        if length is None or not self._relay.core.is_here(digest):
            raise Problem(HTTPStatus.NOT_FOUND, f"chunk {digest.hex()} is not here")
        return web.Response(headers={hdrs.CONTENT_LENGTH: str(length), hdrs.CONTENT_TYPE: requests.RAW})

    async def get_chunk(self, request: web.Request) -> web.StreamResponse:
        digest = requests.digest(request)
        wait = requests.wait(request, self._relay.settings.max_wait)
        if self._relay.core.wanted(digest) is None:
            raise Problem(HTTPStatus.NOT_FOUND, f"no checkpoint here has a chunk {digest.hex()}")
        async with self._sending(), self._relay.chunks.reading(digest, wait) as data:
            headers: dict[str, str] = {hdrs.ETAG: f'"{digest.hex()}"', hdrs.CACHE_CONTROL: "immutable"}
            response = await answers.begin(request, HTTPStatus.OK, data.nbytes, headers)
            await self._send(request, response, data)
        return response

    async def put_chunk(self, request: web.Request) -> web.StreamResponse:
        digest = requests.digest(request)
        length = self._relay.core.wanted(digest)
        if length is None:
            raise Problem(
                HTTPStatus.CONFLICT,
                f"no checkpoint here needs chunk {digest.hex()}; send the manifest that has it first",
            )
        requests.check_length(request, length, exactly=True)
        chunks = self._relay.chunks
        if self._relay.core.is_here(digest):
            await chunks.save(digest)
            self._traffic.deduplicated_bytes += length
            return web.Response(status=HTTPStatus.OK)
        if self._traffic.uploads >= MAX_TRANSFERS:
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, f"{MAX_TRANSFERS} chunks are on their way", retry_after=1)
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
            raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, f"{error}; it was not taken: send it again") from error
        finally:
            self._traffic.uploads -= 1
        return web.Response(status=HTTPStatus.CREATED)

    async def get_pack(self, request: web.Request) -> web.StreamResponse:
        """What is to come is waited for, for each chunk anew."""
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
                    # The status is long gone: that the body ends early is all that can be said.
                    log.warning("pack broken off", checkpoint=key.id, chunk=chunk, reason=str(error) or repr(error))
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
            raise Problem(HTTPStatus.SERVICE_UNAVAILABLE, f"{MAX_TRANSFERS} transfers are open", retry_after=1)
        self._traffic.downloads += 1
        try:
            yield
        finally:
            self._traffic.downloads -= 1


def _range(request: web.Request, size: int) -> tuple[int, int]:
    """First and last byte that are asked for. ``Problem`` 416 for what is no range of ``size`` bytes."""
    text = request.headers.get(hdrs.RANGE)
    if text is None:
        return 0, size - 1
    matched = _RANGE.fullmatch(text)
    one, other = matched.groups() if matched else ("", "")
    if one:
        first, last = int(one), min(int(other), size - 1) if other else size - 1
    else:  # the last bytes, so many
        first, last = max(0, size - int(other or 0)), size - 1
    if not 0 <= first <= last < size:
        raise Problem(
            HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE,
            f"ask for one range bytes=<first>-<last> within the {size} bytes, not {text[:80]!r}",
        )
    return first, last
