"""Chunks and packs over HTTP. A body is received straight into the memory tier."""

from __future__ import annotations

from http import HTTPStatus

from aiohttp import hdrs, web

from keepstep_mesh.net.http import Problem
from keepstep_mesh.protocol.manifest import CHUNK_BYTES
from keepstep_mesh.security.tokens import Access
from keepstep_mesh.serving.application import Route
from keepstep_relay.api import answers, frames, requests
from keepstep_relay.api.downloads import Downloads, asked_range
from keepstep_relay.api.problems import problem_of
from keepstep_relay.node import RelayNode
from keepstep_relay.tiers.chunks import ROOM_SECONDS
from keepstep_relay.tiers.disk_tier import DamagedError

MAX_UPLOADS = 1024


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
        self._downloads = Downloads(relay)

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
        async with self._downloads.counted(), self._relay.chunks.reading(digest, wait) as data:
            headers: dict[str, str] = {hdrs.ETAG: f'"{digest.hex()}"', hdrs.CACHE_CONTROL: "immutable"}
            response = await answers.begin(request, HTTPStatus.OK, data.nbytes, headers)
            await self._downloads.send(request, response, data)
        return response

    async def put_chunk(self, request: web.Request) -> web.StreamResponse:
        digest = requests.digest(request)
        length = self._relay.core.inventory.wanted(digest)
        if length is None:
            raise Problem(
                HTTPStatus.CONFLICT,
                f"no checkpoint of this relay names chunk {digest.hex()}; send its manifest first",
            )
        if not frames.wants_slot(request):
            requests.check_length(request, length, exactly=True)
        elif length != CHUNK_BYTES:
            return web.Response(headers={frames.SLOT: frames.NO_SLOT})
        chunks = self._relay.chunks
        if self._relay.core.inventory.is_here(digest):
            await chunks.save(digest)
            self._traffic.deduplicated_bytes += length
            return web.Response(status=HTTPStatus.OK)
        if self._traffic.uploads >= MAX_UPLOADS:
            raise Problem(
                HTTPStatus.SERVICE_UNAVAILABLE, f"too many uploads (limit {MAX_UPLOADS}); retry", retry_after=1
            )
        self._traffic.uploads += 1
        try:
            await chunks.memory.reserve(length, ROOM_SECONDS)
            data = chunks.memory.buffer(length)
            if frames.wants_slot(request):
                return await self._put_by_process(request, digest, data)
            try:
                found = await requests.chunk(request, data, self._relay.settings.body_timeout)
            except BaseException:
                chunks.memory.release(length)
                raise
            return await self._store(digest, data, found)
        finally:
            self._traffic.uploads -= 1

    async def _put_by_process(self, request: web.Request, digest: bytes, data: memoryview) -> web.StreamResponse:
        """Store a chunk that another process of the relay receives."""
        upload, found = frames.Upload(request), b""
        try:
            found = await upload.digest(data)
        finally:
            if not found:
                self._relay.chunks.memory.release(data.nbytes)
        if not found:
            return await upload.answer(None)
        try:
            answer = await self._store(digest, data, found)
        except Exception as error:
            problem = problem_of(error, request.path)
            if problem is None:
                raise
            answer = problem.response()
        return await upload.answer(answer)

    async def _store(self, digest: bytes, data: memoryview, found: bytes) -> web.Response:
        self._traffic.received_bytes += data.nbytes
        try:
            await self._relay.chunks.put(digest, data, found)
        except DamagedError as error:
            raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, f"{error}; upload it again") from error
        return web.Response(status=HTTPStatus.CREATED)

    async def get_pack(self, request: web.Request) -> web.StreamResponse:
        """Send the pack as its chunks arrive. ``?wait=`` counts for each chunk."""
        key, rank = requests.key(request, self._relay.core), requests.rank_in_path(request)
        wait = requests.wait(request, self._relay.settings.max_wait)
        await self._relay.has_manifest(key, rank, wait)
        table = self._relay.core.checkpoint(key).tables[rank]
        asked = asked_range(request, table.pack_bytes)
        parts = self._downloads.pack(key, table, asked, wait)
        headers: dict[str, str] = {hdrs.ETAG: f'"{table.root.hex()}"'}
        return await self._downloads.answer(request, parts, asked, table.pack_bytes, headers, f"{key}, rank {rank}")
