"""Forward requests of clients to the main process, and move the bytes of chunks in its place (``api.frames``)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from http import HTTPStatus
from urllib.parse import quote

import aiohttp
from aiohttp import hdrs, web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from keepstep_mesh.net.http import Problem
from keepstep_mesh.protocol.manifest import CHUNK_BYTES
from keepstep_mesh.serving.application import certificate_name
from keepstep_relay.api import answers, frames
from keepstep_relay.api.direct_bodies import BODY, Body, body_of
from keepstep_relay.node import RETRY_AFTER_SECONDS
from keepstep_relay.tiers.chunks import ROOM_SECONDS
from keepstep_relay.tiers.shared_slots import SharedSlots

WITHOUT_SLOT = 4
"""Chunks that this process receives into memory of its own at a time."""
_OF_ONE_CONNECTION = frozenset(
    one.lower()
    for one in (
        *(hdrs.CONNECTION, hdrs.KEEP_ALIVE, hdrs.PROXY_AUTHENTICATE, hdrs.PROXY_AUTHORIZATION, hdrs.TE, hdrs.TRAILER),
        *(hdrs.TRANSFER_ENCODING, hdrs.UPGRADE, hdrs.EXPECT, "Proxy-Connection"),
        *frames.FIELDS,
        BODY,
    )
)
"""Fields that are not passed on."""


class Forwarding:
    """Forwards requests over ``owner``, a session whose connections lead to the main process.

    ``body_seconds``: limit of the transfer of one chunk.
    """

    def __init__(self, owner: aiohttp.ClientSession, slots: SharedSlots, body_seconds: float) -> None:
        self._owner = owner
        self._slots = slots
        self._body_seconds = body_seconds
        self._without_slot = asyncio.Semaphore(WITHOUT_SLOT)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.headers.get(hdrs.EXPECT, "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0  # aiohttp counts the bytes of the answer
        try:
            body = body_of(request)
            if body is None:
                return await self._forward(request, request.content if request.body_exists else None)
            if body.length == CHUNK_BYTES:
                answer = await self._put_chunk(request, body)
                if answer is not None:
                    return answer
            async with self._place():
                data = bytearray(body.length)
                await body.receive(memoryview(data), self._body_seconds)
                return await self._forward(request, data)
        except Problem as problem:
            return problem.response()
        except aiohttp.ClientError as error:
            reason = f"the main process of the relay did not answer: {error}; retry"
            return Problem(HTTPStatus.SERVICE_UNAVAILABLE, reason, retry_after=RETRY_AFTER_SECONDS).response()

    @contextlib.asynccontextmanager
    async def _place(self) -> AsyncIterator[None]:
        """Hold one of the places of chunks without a slot. The main process checks the token of the client later."""
        try:
            async with asyncio.timeout(ROOM_SECONDS):
                await self._without_slot.acquire()
        except TimeoutError:
            raise Problem(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"{WITHOUT_SLOT} other chunks that are not of {CHUNK_BYTES} bytes kept a process of the relay busy for "
                f"{ROOM_SECONDS:g} s; retry, or look for clients that send slowly",
                retry_after=RETRY_AFTER_SECONDS,
            ) from None
        try:
            yield
        finally:
            self._without_slot.release()

    async def _forward(
        self, request: web.BaseRequest, body: aiohttp.StreamReader | bytearray | None
    ) -> web.StreamResponse:
        headers = _headers(request)
        if request.method != hdrs.METH_GET or body is not None:
            async with self._owner.request(
                request.method, _url(request), headers=headers, data=body, allow_redirects=False
            ) as answer:
                return await _pass_on(request, answer)
        said: asyncio.Queue[bytes] = asyncio.Queue()
        headers[frames.FRAMES] = frames.WANTED
        async with self._owner.get(_url(request), headers=headers, data=_all(said), allow_redirects=False) as answer:
            if frames.FRAMES in answer.headers:
                return await self._send_frames(request, answer, said)
            said.put_nowait(b"")
            response = await _pass_on(request, answer)
            await answer.wait_for_close()  # the connection is used again only after the whole body was sent
        return response

    # ---- downloads

    async def _send_frames(
        self, request: web.BaseRequest, answer: aiohttp.ClientResponse, said: asyncio.Queue[bytes]
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=_kept(answer.headers))
        response.content_length = int(answer.headers[frames.FRAMES])
        await response.prepare(request)
        with _aborted(request):
            while line := await answer.content.readline():
                try:
                    await self._send_frame(request, response, answer, line.split())
                except frames.TooSlowError:
                    said.put_nowait(frames.TOO_SLOW)
                    said.put_nowait(b"")
                    await answer.content.read()
                    raise
                said.put_nowait(frames.DONE)
        said.put_nowait(b"")
        await response.write_eof()
        await answer.wait_for_close()
        return response

    async def _send_frame(
        self,
        request: web.BaseRequest,
        response: web.StreamResponse,
        answer: aiohttp.ClientResponse,
        frame: list[bytes],
    ) -> None:
        """Return when no buffer refers to the slot any more."""
        if frame[0] == b"-":
            data = memoryview(await answer.content.readexactly(int(frame[1])))
            await answers.send(request, response, data, self._body_seconds)
            return
        slot, start, length = map(int, frame)
        sent = asyncio.Event()
        data = self._slots.view(slot, sent.set)[start : start + length]
        await answers.send(request, response, data, self._body_seconds)
        del data
        try:
            async with asyncio.timeout(self._body_seconds):
                await sent.wait()
        except TimeoutError:
            answers.cut(request)
            raise frames.TooSlowError("the reader was too slow") from None

    # ---- uploads

    async def _put_chunk(self, request: web.BaseRequest, body: Body) -> web.StreamResponse | None:
        """Receive a full chunk into a slot. Return None if the main process has none."""
        said: asyncio.Queue[bytes] = asyncio.Queue()
        headers = _headers(request)
        headers[frames.SLOT] = frames.WANTED
        async with self._owner.put(_url(request), headers=headers, data=_all(said), allow_redirects=False) as answer:
            slot = answer.headers.get(frames.SLOT)
            if slot is None or slot == frames.NO_SLOT:
                said.put_nowait(b"")
                response = None if slot else await _pass_on(request, answer)
                await answer.content.read()
                await answer.wait_for_close()
                return response
            await answer.content.readline()
            data = self._slots.view(int(slot), lambda: None)
            digest = await body.receive(data, self._body_seconds)
            said.put_nowait(digest.hex().encode() + b"\n")
            said.put_nowait(b"")
            status, fields, text = json.loads(await answer.content.read())
            await answer.wait_for_close()
        return web.Response(status=status, headers=fields, body=text.encode())


async def _pass_on(request: web.BaseRequest, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    """Give the client the answer of the main process as it is."""
    response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=_kept(answer.headers))
    await response.prepare(request)
    with _aborted(request):
        async for part in answer.content.iter_any():
            await response.write(part)
    await response.write_eof()
    return response


@contextlib.contextmanager
def _aborted(request: web.BaseRequest) -> Iterator[None]:
    """Close the client's connection if the main process ends its answer too early: the status has been sent."""
    try:
        yield
    except aiohttp.ClientError as error:
        raise answers.cut(request) from error


async def _all(said: asyncio.Queue[bytes]) -> AsyncIterator[bytes]:
    """A body that ends with an empty part. An empty line comes first: aiohttp sends no head without a body."""
    yield b"\n"
    while part := await said.get():
        yield part


def _url(request: web.BaseRequest) -> URL:
    return URL(f"http://relay{request.rel_url.raw_path_qs}", encoded=True)


def _headers(request: web.BaseRequest) -> CIMultiDict[str]:
    headers = _kept(request.headers)
    headers[frames.CLIENT] = request.remote or ""
    if name := certificate_name(request):
        headers[frames.CLIENT_CERTIFICATE] = quote(name)
    return headers


def _kept(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    named = {one.strip().lower() for one in headers.get(hdrs.CONNECTION, "").split(",")}
    return CIMultiDict(
        (name, value)
        for name, value in headers.items()
        if name.lower() not in _OF_ONE_CONNECTION and name.lower() not in named
    )
