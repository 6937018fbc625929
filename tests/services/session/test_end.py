"""A session ends: the group leaves, fails, is evicted, or its process closes it."""

from __future__ import annotations

import asyncio

import pytest

from keepstep_mesh.errors import SessionClosed
from keepstep_mesh.protocol.messages import Evicted, Failed, Leave, QuorumRequest
from keepstep_mesh.testing import DEADLINE, scripted_lighthouse
from tests.services.session.worker import cut_off, in_session


async def test_leaving_waits_for_goodbye_and_ends_the_session() -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse) as (worker, peer):
        leaving = asyncio.create_task(worker.session.leave("done", DEADLINE))
        assert await peer.say_goodbye() == Leave("done")
        await leaving
        await peer.ended()
        with pytest.raises(SessionClosed, match="left the job"):
            await worker.ask()
        await worker.session.leave("again", DEADLINE)


async def test_leaving_is_said_again_on_the_next_connection() -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse) as (worker, peer):
        leaving = asyncio.create_task(worker.session.leave("done", DEADLINE))
        await peer.next(Leave)
        peer.link.abort("test")
        await (await lighthouse.session()).say_goodbye()
        await leaving
        with pytest.raises(SessionClosed, match="left the job"):
            await worker.ask()


async def test_leaving_gives_up_when_nobody_confirms() -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse) as (worker, _):
        with pytest.raises(TimeoutError, match=r"no lighthouse confirmed the leave within 0\.05 s"):
            await worker.session.leave("done", 0.05)


async def test_a_failed_group_is_reported_and_the_connection_closed() -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse) as (worker, peer):
        await worker.session.failed("rank 1 died", DEADLINE)
        assert await peer.next(Failed) == Failed("rank 1 died")
        await peer.ended()


async def test_a_failed_group_without_a_lighthouse_does_not_wait() -> None:
    async with cut_off() as (worker, _, _):
        await worker.session.failed("rank 1 died", DEADLINE)
        with pytest.raises(SessionClosed, match="the group failed: rank 1 died"):
            await worker.ask()


async def test_an_evicted_group_is_told_and_its_request_ends() -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse) as (worker, peer):
        asking = worker.ask()
        await peer.next(QuorumRequest)
        peer.send(Evicted("too slow", 60.0))
        assert await worker.next_push(Evicted) == Evicted("too slow", 60.0)
        with pytest.raises(SessionClosed, match="evicted: too slow"):
            await asking
        with pytest.raises(SessionClosed, match="evicted: too slow"):
            await worker.ask()


async def test_closing_in_the_middle_of_a_request_ends_it() -> None:
    async with scripted_lighthouse() as lighthouse, in_session(lighthouse) as (worker, peer):
        asking = worker.ask()
        await peer.next(QuorumRequest)
        await worker.session.close()
        with pytest.raises(SessionClosed, match="closed"):
            await asking
        await worker.session.close()
