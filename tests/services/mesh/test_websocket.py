"""Links against another implementation of WebSocket (aiohttp's) and against bytes that no decent peer would send."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import WSMsgType, web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from keepstep_mesh.net.websocket import Link, UpgradeError
from keepstep_mesh.security.tokens import Access
from keepstep_mesh.serving.application import Route
from keepstep_mesh.serving.service import Service, serving
from keepstep_mesh.testing import DEADLINE, ChaosProxy

LIMIT = 200_000
UNSENT = 1_000_000


class Peer:
    """One end under test: its link, what came, and why it ended."""

    def __init__(self, *, echo: bool = False) -> None:
        self.frames: asyncio.Queue[bytes] = asyncio.Queue()
        self.echo = echo
        self.losses: list[str] = []
        self.link = Link(self._on_frame, self.losses.append, limit_bytes=LIMIT, unsent_bytes=UNSENT)

    def _on_frame(self, frame: bytes) -> None:
        self.frames.put_nowait(frame)
        if self.echo:
            self.link.send(frame)

    async def next(self) -> bytes:
        async with asyncio.timeout(DEADLINE):
            return await self.frames.get()

    async def lost(self) -> str:
        async with asyncio.timeout(DEADLINE):
            reason = await self.link.closed
        assert self.losses == [reason]
        return reason


@asynccontextmanager
async def echo_server() -> AsyncIterator[tuple[str, asyncio.Queue[Peer]]]:
    """URL of a server that echoes, and its ends of the connections."""
    peers: asyncio.Queue[Peer] = asyncio.Queue()

    async def accept(request: web.Request) -> web.StreamResponse:
        peer = Peer(echo=True)
        response = await peer.link.accept(request)
        peers.put_nowait(peer)
        await peer.link.closed
        return response

    service = Service("echo", [Route("GET", "/", accept, Access.OPEN)])
    async with serving(service, "127.0.0.1", 0, stop_seconds=DEADLINE) as endpoint:
        yield endpoint.url, peers


@asynccontextmanager
async def raw(url: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection that has done the upgrade and may now send any bytes."""
    port = int(url.rsplit(":", 1)[1])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"GET / HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    head = await reader.readuntil(b"\r\n\r\n")
    assert b"101" in head
    assert b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" in head  # the example of RFC 6455 section 1.3
    yield reader, writer
    writer.transport.abort()
    await asyncio.wait([asyncio.ensure_future(writer.wait_closed())], timeout=DEADLINE)


def frame(first: int, payload: bytes, mask: bytes = b"\1\2\3\4", size: int | None = None) -> bytes:
    """A masked frame with any first byte; ``size`` is what it claims."""
    size = len(payload) if size is None else size
    if size < 126:
        head = bytes((first, 0x80 | size))
    elif size < 1 << 16:
        head = bytes((first, 0x80 | 126)) + size.to_bytes(2, "big")
    else:
        head = bytes((first, 0x80 | 127)) + size.to_bytes(8, "big")
    return head + mask + bytes(byte ^ mask[at % 4] for at, byte in enumerate(payload))


async def test_messages_of_every_size_go_both_ways_between_links() -> None:
    async with echo_server() as (url, _), aiohttp.ClientSession() as http:
        peer = Peer()
        await peer.link.connect(http, url)
        sizes = [0, 1, 125, 126, 127, 65535, 65536, LIMIT]
        sent = [os.urandom(size) for size in sizes]
        for message in sent:
            peer.link.send(message)
        assert [await peer.next() for _ in sizes] == sent
        peer.link.close()
        await peer.lost()


async def test_another_implementation_can_be_the_client() -> None:
    async with echo_server() as (url, peers), aiohttp.ClientSession() as http:
        async with http.ws_connect(url, autoping=False) as client:
            for size in (0, 1, 125, 126, 70_000):
                message = os.urandom(size)
                await client.send_bytes(message)
                assert await client.receive_bytes(timeout=DEADLINE) == message
            await client.ping(b"alive?")
            pong = await client.receive(timeout=DEADLINE)
            assert (pong.type, pong.data) == (WSMsgType.PONG, b"alive?")
        peer = await peers.get()
        assert "closed by the peer" in await peer.lost()


async def test_another_implementation_can_be_the_server() -> None:
    async def serve(request: web.Request) -> web.StreamResponse:
        server = web.WebSocketResponse()
        await server.prepare(request)
        async for message in server:
            await server.send_bytes(message.data)
        return server

    service = Service("aiohttp", [Route("GET", "/", serve, Access.OPEN)])
    async with serving(service, "127.0.0.1", 0) as endpoint, aiohttp.ClientSession() as http:
        peer = Peer()
        await peer.link.connect(http, endpoint.url)
        peer.link.ping()
        for size in (0, 125, 126, 70_000):
            message = os.urandom(size)
            peer.link.send(message)
            assert await peer.next() == message
        peer.link.close()
        await peer.lost()


@given(st.binary(max_size=300), st.binary(min_size=4, max_size=4), st.lists(st.integers(0, 400), max_size=6))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_a_message_arrives_whole_however_it_is_masked_and_cut(message, mask, cuts) -> None:
    whole = frame(0x82, message, mask)
    async with echo_server() as (url, peers), raw(url) as (_, writer):
        ends = [0, *sorted(min(cut, len(whole)) for cut in cuts), len(whole)]
        for start, end in itertools.pairwise(ends):
            writer.write(whole[start:end])
            await asyncio.sleep(0)
        assert await (await peers.get()).next() == message


async def test_fragments_become_one_message_and_control_frames_may_come_between() -> None:
    async with echo_server() as (url, peers), raw(url) as (reader, writer):
        writer.write(frame(0x02, b"one ") + frame(0x89, b"ping") + frame(0x00, b"two ") + frame(0x80, b"three"))
        assert await (await peers.get()).next() == b"one two three"
        assert await reader.readexactly(6) == b"\x8a\x04ping"


async def test_many_messages_in_one_packet_are_all_handled_in_order() -> None:
    async with echo_server() as (url, peers), raw(url) as (_, writer):
        writer.write(b"".join(frame(0x82, str(number).encode()) for number in range(500)))
        peer = await peers.get()
        assert [await peer.next() for _ in range(500)] == [str(number).encode() for number in range(500)]


BAD = {
    "reserved bits": (b"\xc2\x80\0\0\0\0", 1002),
    "no mask": (b"\x82\x05hello-", 1002),
    "unknown opcode": (frame(0x83, b""), 1002),
    "long ping": (frame(0x89, b"x" * 126), 1002),
    "fragmented ping": (frame(0x09, b""), 1002),
    "continuation of nothing": (frame(0x80, b"x"), 1002),
    "a message within a message": (frame(0x02, b"x") + frame(0x82, b"y"), 1002),
    "text": (frame(0x81, b"hello"), 1003),
    "one beyond the limit": (frame(0x82, b"", size=LIMIT + 1), 1009),
    "a size of 2^63": (frame(0x82, b"", size=(1 << 64) - 1), 1009),
    "fragments beyond the limit": (frame(0x02, b"x" * (LIMIT - 70)) + frame(0x00, b"x" * 71), 1009),
    "endless empty fragments": (frame(0x02, b"") + frame(0x00, b"") * 4000, 1009),
    "http": (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", 1002),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_bytes_end_the_connection_with_the_code_for_it(name: str) -> None:
    bad, code = BAD[name]
    async with echo_server() as (url, peers), raw(url) as (reader, writer):
        writer.write(bad)
        peer = await peers.get()
        await peer.lost()
        assert peer.frames.empty()
        answer = await reader.read()
        assert answer[0] == 0x88
        assert int.from_bytes(answer[2:4], "big") == code


@given(st.binary(max_size=200))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_noise_harms_nobody_else(noise) -> None:
    async with echo_server() as (url, peers), aiohttp.ClientSession() as http:
        async with raw(url) as (_, writer):
            writer.write(noise)
            other = Peer()
            await other.link.connect(http, url)
            other.link.send(b"still here")
            assert await other.next() == b"still here"
            other.link.close()
            await other.lost()
        for _ in range(2):
            await (await peers.get()).lost()


async def test_a_peer_that_does_not_read_is_cut_off_and_bounds_memory() -> None:
    async with echo_server() as (url, peers), raw(url):
        peer = await peers.get()
        async with asyncio.timeout(DEADLINE):
            while not peer.link.closed.done():
                peer.link.send(bytes(100_000))
                await asyncio.sleep(0)
        assert "does not read" in await peer.lost()


async def test_a_peer_that_asks_on_and_does_not_read_the_answers_is_cut_off() -> None:
    async with echo_server() as (url, peers), raw(url) as (_, writer):
        peer, pings = await peers.get(), frame(0x89, bytes(125)) * 1000
        async with asyncio.timeout(DEADLINE):
            while not peer.link.closed.done() and not writer.is_closing():
                writer.write(pings)
                await asyncio.sleep(0)
        assert "does not read" in await peer.lost()


async def test_a_frame_sent_after_the_end_is_dropped() -> None:
    async with echo_server() as (url, _), aiohttp.ClientSession() as http:
        peer = Peer()
        await peer.link.connect(http, url)
        peer.link.close()
        peer.link.send(b"late")
        peer.link.ping()
        peer.link.close()
        await peer.lost()
        assert peer.frames.empty()


async def test_an_answer_that_is_no_upgrade_says_what_it_was() -> None:
    async with echo_server() as (url, _), aiohttp.ClientSession() as http:
        with pytest.raises(UpgradeError, match=r"answers 404 .*: path /elsewhere not found$") as raised:
            await Peer().link.connect(http, f"{url}/elsewhere")
        assert raised.value.status == 404


async def test_an_answer_of_a_server_of_another_kind_is_not_repeated() -> None:
    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 17\r\n\r\n<html>torchft</ht")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, aiohttp.ClientSession() as http:
        host, port = server.sockets[0].getsockname()
        with pytest.raises(UpgradeError, match=r"the server at this address is not a keepstep service$"):
            await Peer().link.connect(http, f"http://{host}:{port}/v1/jobs/job/session")


async def test_a_plain_request_to_a_session_is_a_bad_request() -> None:
    async with echo_server() as (url, _), aiohttp.ClientSession() as http, http.get(url) as response:
        assert response.status == 400
        assert "WebSocket" in (await response.json(content_type=None))["detail"]


async def test_a_cut_connection_is_lost_on_both_sides() -> None:
    async with echo_server() as (url, peers), ChaosProxy.before(url) as proxy, aiohttp.ClientSession() as http:
        peer = Peer()
        await peer.link.connect(http, proxy.url)
        proxy.cut()
        assert await peer.lost()
        assert await (await peers.get()).lost()


async def test_a_half_open_connection_looks_alive_until_it_is_asked() -> None:
    async with echo_server() as (url, peers), ChaosProxy.before(url) as proxy, aiohttp.ClientSession() as http:
        peer = Peer()
        await peer.link.connect(http, proxy.url)
        peer.link.send(b"there?")
        assert await peer.next() == b"there?"
        heard = peer.link.last_received
        proxy.half_open()
        await (await peers.get()).lost()
        peer.link.ping()
        peer.link.send(b"still there?")
        assert not peer.link.closed.done()
        assert peer.link.last_received == heard
        peer.link.abort("enough")
        assert await peer.lost() == "enough"


async def test_a_frozen_connection_delivers_when_it_thaws() -> None:
    async with echo_server() as (url, _), ChaosProxy.before(url) as proxy, aiohttp.ClientSession() as http:
        peer = Peer()
        await peer.link.connect(http, proxy.url)
        proxy.freeze()
        peer.link.send(b"later")
        await asyncio.sleep(0.05)  # nothing tells that nothing comes
        assert peer.frames.empty()
        proxy.thaw()
        assert await peer.next() == b"later"
        peer.link.close()
        await peer.lost()
