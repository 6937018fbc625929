"""How long a rank, or its group server, may be silent: as long as the job's policy lets a group be, at least."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from keepstep.group.group_server import GroupServer
from keepstep.group.ranks.rank_client import RankClient
from keepstep.group.ranks.rank_link import GroupSettings
from keepstep.runtime.loop_thread import LoopThread
from keepstep.session.session_settings import SessionSettings
from keepstep_lighthouse.app import Lighthouse
from keepstep_lighthouse.quorum.events import PolicyOrdered
from keepstep_mesh.net import lighthouse_addresses
from keepstep_mesh.protocol.group_messages import RankAsk
from keepstep_mesh.protocol.policy import Policy
from tests.support.services.lighthouse_driver import eventually
from tests.support.services.lighthouse_driver import lighthouse as in_loop

DEADLINE = 30.0
LEAST = 0.5
"""``RANK_SILENCE`` in these tests."""


@pytest.fixture(autouse=True)
def short_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("keepstep.group.ranks.rank_link.RANK_BEAT", 0.05)
    monkeypatch.setattr("keepstep.group.ranks.rank_link.RANK_SILENCE", LEAST)


class Pair:
    """A group of two whose ranks run in threads of their own, so that one can be frozen."""

    def __init__(self, lighthouse: Lighthouse) -> None:
        self.lighthouse = lighthouse
        self.failed: list[str] = []
        self.threads = [LoopThread("rank 0"), LoopThread("rank 1")]
        self.server = GroupServer(
            GroupSettings(2, "127.0.0.1"),
            SessionSettings((lighthouse.address,), "default", "a:1"),
            self.failed.append,
            lambda _: None,
        )

    async def start(self) -> None:
        await asyncio.to_thread(self.threads[0].call, self.server.start(), DEADLINE)
        self.client = RankClient(self.server.address, 1, 2, 0, None, self.failed.append, lambda _: None)
        await asyncio.to_thread(self.threads[1].call, self.client.start(DEADLINE), DEADLINE)

    def freeze(self, rank: int) -> Callable[[], None]:
        """Blocks the thread of a rank until the result is called."""
        over = threading.Event()
        self.threads[rank].loop.call_soon_threadsafe(over.wait, DEADLINE)
        return over.set

    async def told(self, heartbeat_timeout: float) -> None:
        await eventually(lambda: self.client._session.liveness.timeout == max(LEAST, heartbeat_timeout))

    async def ask(self) -> list[object]:
        ask = RankAsk(1, 0, "", False, 0, 10_000)
        calls = zip(self.threads, (self.server, self.client), strict=True)
        return await asyncio.gather(*[asyncio.wrap_future(thread.spawn(link.ask(ask))) for thread, link in calls])

    async def close(self) -> None:
        for thread, link in zip(reversed(self.threads), (self.client, self.server), strict=True):
            await asyncio.to_thread(thread.call, link.close(), DEADLINE)
            await asyncio.to_thread(thread.stop)


@asynccontextmanager
async def pair(heartbeat_timeout: float) -> AsyncIterator[Pair]:
    async with in_loop(policy=Policy(heartbeat_timeout=heartbeat_timeout)) as lighthouse:
        one = Pair(lighthouse)
        await one.start()
        try:
            await one.told(heartbeat_timeout)
            yield one
        finally:
            await one.close()


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_is_silent_for_less_than_the_heartbeat_timeout_survives(rank):
    async with pair(heartbeat_timeout=20.0) as group:
        thaw = group.freeze(rank)
        await asyncio.sleep(3 * LEAST)  # the silence itself
        thaw()
        assert len(await group.ask()) == 2
        assert group.failed == []


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_frozen_rank_is_noticed_after_the_heartbeat_timeout(rank):
    async with pair(heartbeat_timeout=2.0) as group:
        began = asyncio.get_running_loop().time()
        thaw = group.freeze(rank)
        try:
            await eventually(lambda: group.failed)
            assert asyncio.get_running_loop().time() - began >= 1.9
        finally:
            thaw()


async def test_a_heartbeat_timeout_below_the_least_silence_does_not_count():
    async with pair(heartbeat_timeout=0.2) as group:
        assert group.server._connections.silence == LEAST


async def test_a_change_of_the_policy_reaches_all_ranks_at_once():
    async with pair(heartbeat_timeout=20.0) as group:
        job = group.lighthouse.jobs["default"]
        await job.order(PolicyOrdered(replace(job.core.record.policy, heartbeat_timeout=1.5), "ann"))
        await group.told(1.5)
        assert group.server._connections.silence == 1.5
        thaw = group.freeze(0)
        await eventually(lambda: group.failed)
        thaw()


async def test_a_rank_that_comes_while_rank_0_is_frozen_joins_when_it_goes_on(monkeypatch):
    monkeypatch.setattr(lighthouse_addresses, "SESSION_CONNECT_SECONDS", 0.1)
    async with in_loop(policy=Policy(heartbeat_timeout=20.0)) as lighthouse:
        group = Pair(lighthouse)
        await asyncio.to_thread(group.threads[0].call, group.server.start(), DEADLINE)
        thaw = group.freeze(0)
        client = RankClient(group.server.address, 1, 2, 0, None, group.failed.append, lambda _: None)
        starting = asyncio.wrap_future(group.threads[1].spawn(client.start(DEADLINE)))
        await eventually(lambda: "no answer within" in client._session.last_problem)
        thaw()
        await starting
        group.client = client
        assert len(await group.ask()) == 2
        assert group.failed == []
        await group.close()
