"""A service with a link over TLS, on both event loops."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
from aiohttp import web

from keepstep_mesh.net.websocket import Link
from keepstep_mesh.security.tls import TlsFiles
from keepstep_mesh.security.tokens import Access
from keepstep_mesh.serving.application import Route
from keepstep_mesh.serving.service import Endpoint, Service, serving
from keepstep_mesh.testing import DEADLINE

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
LIMIT = 8_000_000
both_loops = pytest.mark.parametrize("loop", LOOPS)
both_versions = pytest.mark.parametrize("version", VERSIONS)


def on(loop: str, scenario: Coroutine[Any, Any, None]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(DEADLINE):
            await scenario

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(limited())


class Peer:
    """One end of a link under test."""

    def __init__(self, on_frame: Callable[[Peer, bytes], None] = lambda _, __: None) -> None:
        self.frames: asyncio.Queue[bytes] = asyncio.Queue()
        self.losses: list[str] = []
        self._on_frame = on_frame
        self.link = Link(self._took, self.losses.append, limit_bytes=LIMIT, unsent_bytes=1 << 28)

    def _took(self, frame: bytes) -> None:
        self.frames.put_nowait(frame)
        self._on_frame(self, frame)

    async def lost(self) -> str:
        reason = await self.link.closed
        assert self.losses == [reason]
        return reason


def echo(peer: Peer, frame: bytes) -> None:
    peer.link.send(frame)


@asynccontextmanager
async def running(
    tls: TlsFiles | None, on_frame: Callable[[Peer, bytes], None] = echo, **how: Any
) -> AsyncIterator[tuple[Endpoint, asyncio.Queue[Peer]]]:
    """A service with a route ``/link``, and its ends of the links."""
    peers: asyncio.Queue[Peer] = asyncio.Queue()

    async def accept(request: web.Request) -> web.StreamResponse:
        peer = Peer(on_frame)
        response = await peer.link.accept(request)
        peers.put_nowait(peer)
        await peer.link.closed
        return response

    described = Service("test", [Route("GET", "/link", accept, Access.READ)])
    async with serving(described, "127.0.0.1", 0, tls=tls, stop_seconds=DEADLINE, **how) as endpoint:
        yield endpoint, peers
