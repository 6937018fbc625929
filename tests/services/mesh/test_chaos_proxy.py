"""The proxy of ``keepstep_mesh.testing``: whom it cuts, and whom it lets through."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from keepstep_mesh.testing import ChaosProxy

DEADLINE = 30.0


class Client:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def asks(self, text: bytes) -> bytes:
        """Return the answer; empty if the connection ended."""
        try:
            self._writer.write(text)
            async with asyncio.timeout(DEADLINE):
                return await self._reader.read(100)
        except ConnectionError:
            return b""


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(100):
        writer.write(data)
    writer.close()


@pytest.fixture
async def proxy() -> AsyncIterator[ChaosProxy]:
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    async with ChaosProxy("127.0.0.1", server.sockets[0].getsockname()[1]) as proxy:
        yield proxy
    server.close()
    await server.wait_closed()


@asynccontextmanager
async def client(proxy: ChaosProxy) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    try:
        yield Client(reader, writer)
    finally:
        writer.transport.abort()


async def test_bytes_go_there_and_back(proxy: ChaosProxy) -> None:
    async with client(proxy) as one:
        assert await one.asks(b"hello") == b"hello"
        assert proxy.connections == 1


async def test_only_the_connections_that_are_meant_are_cut(proxy: ChaosProxy) -> None:
    async with client(proxy) as worker, client(proxy) as standby:
        assert await worker.asks(b"GET /jobs") == b"GET /jobs"
        assert await standby.asks(b"GET /lighthouses") == b"GET /lighthouses"
        proxy.cut(only=b"GET /jobs")
        assert await worker.asks(b"more") == b""
        assert await standby.asks(b"GET /jobs is said later") == b"GET /jobs is said later"
    async with client(proxy) as worker:
        assert await worker.asks(b"GET /jobs") == b"GET /jobs", "it may come again"


async def test_only_the_connections_that_are_meant_are_refused(proxy: ChaosProxy) -> None:
    proxy.refuse(only=b"GET /jobs")
    async with client(proxy) as worker, client(proxy) as standby:
        assert await worker.asks(b"GET /jobs") == b""
        assert await standby.asks(b"GET /lighthouses") == b"GET /lighthouses"
    proxy.refuse()
    async with client(proxy) as standby:
        assert await standby.asks(b"GET /lighthouses") == b""
    proxy.accept()
    async with client(proxy) as worker:
        assert await worker.asks(b"GET /jobs") == b"GET /jobs"


async def test_at_its_end_nothing_is_open(proxy: ChaosProxy) -> None:
    async with client(proxy) as one:
        assert await one.asks(b"hello") == b"hello"
        proxy.freeze()
        await proxy.__aexit__()
        assert await one.asks(b"more") == b""
