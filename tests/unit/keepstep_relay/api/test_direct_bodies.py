"""Bodies of chunks that do not pass through aiohttp, on real connections."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from aiohttp import web

from keepstep_mesh.net.event_loop import new_event_loop
from keepstep_mesh.net.http import Problem
from keepstep_mesh.protocol.manifest import CHUNK_BYTES, chunk_digest
from keepstep_relay.api import direct_bodies
from keepstep_relay.api.direct_bodies import BODY, DirectBodies, body_of, direct, drop_unread

SECONDS = 60.0
PATH = "/v1/chunks/" + "ab" * 16
CHUNK = bytes(range(256)) * 8192


class Scene:
    """A server, and what its handlers saw."""

    def __init__(self) -> None:
        self.received: list[tuple[bytes | bytearray, bytes]] = []
        """Each body and the digest of ``receive``; of bodies that aiohttp had, the digest is empty."""
        self.refused: list[str] = []
        self.has_refused = asyncio.Event()
        self.may_receive = asyncio.Event()
        self.may_receive.set()
        self.asked = asyncio.Event()
        self.body_seconds = SECONDS
        self.port = 0
        self.connections: list[DirectBodies] = []

    async def put(self, request: web.Request) -> web.Response:
        self.asked.set()
        await self.may_receive.wait()
        if "refuse" in request.query:
            return web.Response(status=409, text="refused")
        body = body_of(request)
        if body is None:
            self.received.append((await request.read(), b""))
            return web.Response(text="aiohttp")
        data = bytearray(body.length)
        try:
            self.received.append((data, await body.receive(memoryview(data), self.body_seconds)))
        except Problem as error:
            self.refused.append(str(error))
            self.has_refused.set()
            return web.Response(status=400, text="not received")
        return web.Response(text="direct")

    async def other(self, request: web.Request) -> web.Response:
        return web.Response(text=f"{request.method} {len(await request.read())}")

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Scene]:
        app = web.Application(middlewares=[drop_unread])
        app.router.add_put("/v1/chunks/{digest}", self.put)
        app.router.add_route("*", "/other", self.other)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        assert runner.server is not None
        accept = direct(runner.server)

        def accepted() -> asyncio.BaseProtocol:
            connection = accept()
            assert isinstance(connection, DirectBodies)
            self.connections.append(connection)
            return connection

        server = await asyncio.get_running_loop().create_server(accepted, "127.0.0.1", 0)
        try:
            self.port = server.sockets[0].getsockname()[1]
            yield self
        finally:
            server.close()
            await runner.cleanup()

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            yield Client(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, *parts: bytes) -> None:
        for part in parts:
            self.writer.write(part)
            await self.writer.drain()

    async def answer(self) -> str:
        """Return status and text of the next answer."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
        return f"{head.split()[1]} {(await self.reader.readexactly(length)).decode()}"


def put(body: bytes, query: str = "") -> bytes:
    return f"PUT {PATH}{query} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode()


def post(body: bytes) -> bytes:
    return f"POST /other HTTP/1.1\r\nHost: localhost\r\ncontent-length:{len(body)}\r\n\r\n".encode() + body


GET = b"GET /other HTTP/1.1\r\nHost: localhost\r\n\r\n"


Work = Callable[[Scene, Client], Awaitable[None]]
Run = Callable[[Work], None]


@pytest.fixture(params=["uvloop", "asyncio"])
def run(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a client against a scene, on each kind of event loop."""
    monkeypatch.setattr(direct_bodies, "LINGER_SECONDS", SECONDS)

    async def scene(work: Work) -> None:
        async with asyncio.timeout(SECONDS), Scene().running() as one, one.client() as client:
            await work(one, client)

    def run_it(work: Work) -> None:
        factory = new_event_loop if request.param == "uvloop" else asyncio.new_event_loop
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(scene(work))

    return run_it


def test_bodies_arrive_in_the_memory_of_the_handler_between_other_requests_of_a_connection(run: Run) -> None:
    async def work(scene: Scene, client: Client) -> None:
        for body in (CHUNK, CHUNK[:1], CHUNK[1:]):
            await client.send(put(body), body)
            assert await client.answer() == "200 direct"
            assert scene.received.pop() == (body, chunk_digest(body))
            await client.send(post(b"{}"), GET)
            assert [await client.answer(), await client.answer()] == ["200 POST 2", "200 GET 0"]

    run(work)


def test_requests_that_arrive_together_are_answered_in_order(run: Run) -> None:
    async def work(scene: Scene, client: Client) -> None:
        everything = GET + put(CHUNK) + CHUNK + put(b"x") + b"x" + post(CHUNK[:1000]) + put(b"yz") + b"yz" + GET
        sending = asyncio.create_task(client.send(everything))
        answers = [await client.answer() for _ in range(6)]
        await sending
        assert answers == ["200 GET 0", "200 direct", "200 direct", "200 POST 1000", "200 direct", "200 GET 0"]
        assert [body for body, _ in scene.received] == [CHUNK, b"x", b"yz"]

    run(work)


def test_a_head_may_arrive_byte_by_byte(run: Run) -> None:
    async def work(scene: Scene, client: Client) -> None:
        for one in (put(b"abc") + b"abc", b"PUT /other HTTP/1.1\r\nHost: localhost\r\n\r\n"):
            for byte in one:
                await client.send(bytes([byte]))
                await asyncio.sleep(0)
        assert [await client.answer(), await client.answer()] == ["200 direct", "200 PUT 0"]
        assert scene.received == [(b"abc", chunk_digest(b"abc"))]

    run(work)


def test_a_body_waits_for_its_handler(run: Run) -> None:
    async def work(scene: Scene, client: Client) -> None:
        scene.may_receive.clear()
        sending = asyncio.create_task(client.send(put(CHUNK), CHUNK))
        await scene.asked.wait()
        async with scene.client() as other:
            await other.send(GET)
            assert await other.answer() == "200 GET 0"
        scene.may_receive.set()
        assert await client.answer() == "200 direct"
        await sending
        assert scene.received == [(CHUNK, chunk_digest(CHUNK))]

    run(work)


def test_a_body_that_its_handler_refuses_is_dropped_and_the_connection_goes_on(run: Run) -> None:
    async def work(scene: Scene, client: Client) -> None:
        await client.send(put(CHUNK, "?refuse"))
        assert await client.answer() == "409 refused"
        await client.send(CHUNK, GET)
        assert await client.answer() == "200 GET 0"
        assert not scene.received

    run(work)


def test_a_connection_whose_refused_body_does_not_come_is_closed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(scene: Scene, client: Client) -> None:
        monkeypatch.setattr(direct_bodies, "LINGER_SECONDS", 0.01)
        await client.send(put(CHUNK, "?refuse"))
        assert await client.answer() == "409 refused"
        assert not await client.reader.read()
        assert not scene.received

    run(work)


def test_a_body_that_stops_is_refused_at_its_deadline(run: Run) -> None:
    async def work(scene: Scene, client: Client) -> None:
        scene.body_seconds = 0.05
        await client.send(put(CHUNK), CHUNK[:1000])
        assert await client.answer() == "400 not received"
        assert len(scene.refused) == 1
        assert f"1000 of {len(CHUNK)} bytes in 0.05 s" in scene.refused[0] or f"0 of {len(CHUNK)}" in scene.refused[0]
        await client.send(CHUNK[1000:], GET)
        assert await client.answer() == "200 GET 0"

    run(work)


def test_the_end_of_a_connection_ends_the_wait_for_a_body(run: Run) -> None:
    async def work(scene: Scene, client: Client) -> None:
        async with scene.client() as other:
            await other.send(put(CHUNK), CHUNK[:-1])
            await scene.asked.wait()
        await scene.has_refused.wait()
        assert "incomplete body" in scene.refused[0]
        await client.send(put(b"x"), b"x")
        assert await client.answer() == "200 direct"

    run(work)


def test_other_bodies_are_aiohttps_whatever_they_contain(run: Run) -> None:
    async def work(scene: Scene, client: Client) -> None:
        hidden = put(b"x") + b"x"
        await client.send(post(hidden))
        assert await client.answer() == f"200 POST {len(hidden)}"
        large = bytes(CHUNK_BYTES + 1)
        sending = asyncio.create_task(client.send(put(large), large))
        assert (await client.answer()).startswith("413")  # aiohttp's limit
        sending.cancel()
        await asyncio.wait([sending])
        assert not scene.received

    run(work)


def test_after_a_body_of_unknown_length_the_connection_is_aiohttps(run: Run) -> None:
    async def work(scene: Scene, client: Client) -> None:
        head = b"POST /other HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        await client.send(head, b"3\r\nabc\r\n0\r\n\r\n", put(b"x"), b"x")
        assert [await client.answer(), await client.answer()] == ["200 POST 3", "200 aiohttp"]
        assert scene.received == [(b"x", b"")]

    run(work)


def test_a_client_cannot_name_a_body_of_another_request(run: Run) -> None:
    async def work(scene: Scene, client: Client) -> None:
        await client.send(f"PUT {PATH} HTTP/1.1\r\nHost: localhost\r\n{BODY}: 1\r\n\r\n".encode())
        assert await client.answer() == "200 aiohttp"
        assert scene.received == [(b"", b"")]

    run(work)


@pytest.mark.parametrize("field", [f"{BODY}: none", "Expect: something"])
def test_no_body_is_kept_for_a_request_that_no_handler_can_find_it_with(run: Run, field: str) -> None:
    async def work(scene: Scene, client: Client) -> None:
        body = CHUNK[:1000]
        head = f"PUT {PATH} HTTP/1.1\r\nHost: localhost\r\n{field}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        for _ in range(3):
            await client.send(head, body)
            assert await client.answer()
        assert [len(one.bodies) for one in scene.connections] == [0]

    run(work)
