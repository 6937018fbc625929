"""Links over TLS: frames, closes and aborts arrive as without it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from keepstep_mesh.net.http import client_session
from keepstep_mesh.testing import ChaosProxy
from tests.services.mesh.security.tls_driver import (
    LIMIT,
    VERSIONS,
    Peer,
    both_loops,
    both_versions,
    echo,
    on,
    running,
)
from tests.support.network.certificates import Authority


@asynccontextmanager
async def linked(
    authority: Authority, version: str = "1.3", on_frame: Callable[[Peer, bytes], None] = echo
) -> AsyncIterator[tuple[Peer, Peer]]:
    """Both ends of a link: the worker's, the service's."""
    context = authority.trusted().client_context()
    context.maximum_version = VERSIONS[version]
    async with running(authority.service(), on_frame) as (endpoint, peers), client_session(tls=context) as http:
        worker = Peer()
        await worker.link.connect(http, f"{endpoint.url}/link")
        yield worker, await peers.get()
        worker.link.abort("the test is over")


@both_loops
@both_versions
def test_frames_of_any_size_arrive_whole(loop: str, version: str, authority: Authority) -> None:
    async def scenario() -> None:
        async with linked(authority, version) as (worker, _):
            frames = [bytes([size % 251]) * size for size in (0, 1, 125, 126, 16_384, 65_536, 1_000_000, LIMIT - 1)]
            for frame in frames:
                worker.link.send(frame)
            assert [await worker.frames.get() for _ in frames] == frames

    on(loop, scenario())


@both_loops
@both_versions
@pytest.mark.parametrize("who", ["worker", "service"])
def test_frames_sent_before_a_close_arrive_and_both_ends_get_the_reason(
    loop: str, version: str, who: str, authority: Authority
) -> None:
    async def scenario() -> None:
        async with linked(authority, version, lambda _, __: None) as ends:
            closing, other = ends if who == "worker" else reversed(ends)
            closing.link.send(b"x" * 1_000_000)
            closing.link.close(reason="enough")
            assert await other.lost() == "closed by the peer: enough"
            assert await closing.lost() == "enough"
            assert len(other.frames.get_nowait()) == 1_000_000

    on(loop, scenario())


@both_loops
@both_versions
def test_nothing_is_heard_after_a_close(loop: str, version: str, authority: Authority) -> None:
    async def scenario() -> None:
        async with linked(authority, version, lambda _, __: None) as (worker, peer):
            peer.link._transport.pause_reading()
            for _ in range(4):
                worker.link.send(b"x" * LIMIT)
            worker.link.close()
            peer.link.send(b"too late")
            peer.link._transport.resume_reading()
            await worker.lost()
            assert worker.frames.empty()

    on(loop, scenario())


@both_loops
@both_versions
def test_an_abort_is_heard_by_the_other_end(loop: str, version: str, authority: Authority) -> None:
    async def scenario() -> None:
        async with linked(authority, version) as (worker, peer):
            worker.link.abort("the machine died")
            assert await worker.lost() == "the machine died"
            await peer.lost()

    on(loop, scenario())


@both_loops
def test_a_peer_that_says_no_goodbye_does_not_hold_up_a_close(loop: str, authority: Authority) -> None:
    async def scenario() -> None:
        context = authority.trusted().client_context()
        async with (
            running(authority.service()) as (endpoint, peers),
            ChaosProxy.before(endpoint.url) as proxy,
            client_session(tls=context) as http,
        ):
            worker = Peer()
            await worker.link.connect(http, f"{proxy.url}/link")
            peer = await peers.get()
            proxy.freeze()
            peer.link.close(reason="the service ends")
            assert await peer.lost() == "the service ends"
            worker.link.abort("the test is over")
            await worker.lost()

    on(loop, scenario())
