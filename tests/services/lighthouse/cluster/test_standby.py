"""Two lighthouses on one etcd: what a follower does with workers, readers and orders; when a leader gives way."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from keepstep_lighthouse.app import Lighthouse, LighthouseSettings
from keepstep_lighthouse.leadership import forwarding
from keepstep_lighthouse.leadership.campaign import LEADER_KEY
from keepstep_lighthouse.leadership.election import Leader
from keepstep_lighthouse.store.opening import open_store
from keepstep_mesh.protocol.messages import NotLeader, Quorum
from keepstep_mesh.protocol.policy import Policy
from tests.support.services.etcd_server import EtcdCluster
from tests.support.services.lighthouse_driver import DEADLINE, connection, eventually, lighthouse, worker


@pytest.fixture
def store(etcd: EtcdCluster) -> str:
    return f"{etcd.address}/{uuid.uuid4()}"


@asynccontextmanager
async def two(store: str) -> AsyncIterator[tuple[Lighthouse, Lighthouse]]:
    """The leader and one that follows it."""
    async with lighthouse(store=store, lease=3.0) as leader, lighthouse(store=store, lease=3.0) as follower:
        await eventually(lambda: len(leader.followers) == 1)
        yield leader, follower


async def test_a_worker_that_comes_to_the_one_that_follows_is_told_who_leads(store: str) -> None:
    async with two(store) as (leader, follower), connection(follower.address) as lost:
        await lost.hello()
        assert (await lost.next(NotLeader)).leader == leader.address


async def test_reads_are_answered_whole_and_orders_are_sent_on(store: str) -> None:
    async with two(store) as (leader, follower), worker(leader.address) as one, aiohttp.ClientSession() as http:
        await one.ask()
        await one.next(Quorum)
        for number in range(300):  # an answer that comes in several pieces
            leader.events.add("job", "note", f"r{number}", {"text": "x" * 1000}, time.time())
        for path in ("/v1/jobs", "/v1/jobs/job/events?limit=1000", "/v1/jobs/none"):
            async with http.get(leader.address + path) as theirs, http.get(follower.address + path) as ours:
                assert (ours.status, await ours.json(content_type=None)) == (
                    theirs.status,
                    await theirs.json(content_type=None),
                )
        order = f"{follower.address}/v1/jobs/job/replicas/r0/drain"
        async with http.post(order, json={"reason": "x"}, allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"]) == (
                307,
                f"{leader.address}/v1/jobs/job/replicas/r0/drain",
            )
        async with http.get(f"{follower.address}/v1/cluster") as answer:
            nodes = (await answer.json())["nodes"]
        assert {node["address"]: node["leads"] for node in nodes} == {leader.address: True, follower.address: False}


async def test_an_answer_too_large_to_forward_is_a_problem_that_names_the_leader(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarding, "MAX_ANSWER_BYTES", 10)
    async with (
        two(store) as (leader, follower),
        aiohttp.ClientSession() as http,
        http.get(f"{follower.address}/v1/jobs") as answer,
    ):
        assert answer.status == 502
        assert f"answer of {leader.address}/v1/jobs too large (limit 10 bytes)" in await answer.text()


async def test_a_leader_that_no_worker_reaches_gives_way_to_where_they_come(store: str) -> None:
    async with two(store) as (leader, follower):
        async with asyncio.timeout(DEADLINE):
            while follower.term is None:
                async with connection(follower.address) as lost:
                    await lost.hello()
                    await lost.message()
                await asyncio.sleep(0.1)  # as a worker that is turned away comes again
        assert leader.term is None
        async with worker(follower.address) as one:
            assert one.welcome.epoch == 2


async def test_a_leader_whose_lease_is_over_by_its_own_clock_answers_nobody(store: str) -> None:
    async with lighthouse(store=store) as leader, worker(leader.address) as one:
        await one.ask()
        await one.next(Quorum)
        assert leader.term is not None
        leader.term._until = lambda: time.monotonic() - 1  # as after a sleep of the whole machine
        await one.ask(1)
        await one.ended()


async def test_a_lighthouse_that_finds_its_own_address_in_the_key_sends_nobody_there(store: str) -> None:
    async with lighthouse(store=store) as one:
        assert one.leadership is not None
        before = await open_store(store)
        lease = await before.grant_lease(20)
        await before.put(LEADER_KEY, Leader("another-life", one.address, lease).encode(), lease)
        await eventually(lambda: one.term is None)
        async with aiohttp.ClientSession() as http, http.get(f"{one.address}/v1/jobs") as answer:
            assert answer.status == 503
        await before.revoke(lease)
        await before.close()
        await eventually(lambda: one.term is not None)


async def test_a_lighthouse_whose_etcd_is_away_says_so(etcd: EtcdCluster) -> None:
    assert etcd.nodes  # gRPC is warm
    one = Lighthouse(LighthouseSettings(bind="127.0.0.1:0", store="etcd://127.0.0.1:1/x"))
    await one.start()
    try:
        await eventually(lambda: "cannot read from etcd" in (one.not_ready() or ""))
        async with aiohttp.ClientSession() as http, http.get(f"{one.address}/v1/jobs") as answer:
            assert (answer.status, "cannot read from etcd" in await answer.text()) == (503, True)
    finally:
        await one.stop()


async def test_after_a_takeover_strangers_wait_until_the_lease_before_is_over(store: str) -> None:
    """The key may be gone because who deposed the last leader gave it back: that leader may still be at work."""
    lease, hasty = 3.0, Policy(min_replicas=1, takeover_grace=0.0)  # so that nothing but the lease is waited for
    async with lighthouse(store=store, lease=lease, policy=hasty) as first, worker(first.address, "a:1") as member:
        await member.ask()
        await member.next(Quorum)
    began = time.monotonic()
    async with lighthouse(store=store, lease=lease) as second, worker(second.address, "c:1") as stranger:
        await stranger.ask()
        await stranger.next(Quorum)
        assert time.monotonic() - began >= lease


async def test_the_events_of_a_leader_that_has_gone_are_at_the_next_one_and_come_back_after_a_restart(
    store: str,
) -> None:
    async def kinds(address: str, **query: int) -> list[tuple[int, str]]:
        async with aiohttp.ClientSession() as http, http.get(f"{address}/v1/jobs/job/events", params=query) as answer:
            events = (await answer.json())["events"]
        assert [one["id"] for one in events] == sorted({one["id"] for one in events})
        return [(one["epoch"], one["kind"]) for one in events]

    async with lighthouse(store=store, lease=3.0) as second, lighthouse(store=store, lease=3.0) as third:
        await eventually(lambda: len(second.followers) == 1)
        async with worker(second.address) as one:
            await one.ask()
            await one.next(Quorum)
        for number in range(1200):  # more than one batch
            second.events.add("job", "note", f"r{number}", {}, time.time())
        before = await kinds(second.address, limit=5000)
        assert (1, "quorum") in before
        await eventually(lambda: len(third.events.after("job", 0, 5000)) >= len(before))
        assert third.events.counts["job"] == {}, "a lighthouse counts its own events only"
        await second.stop()
        await eventually(lambda: third.term is not None)
        assert (await kinds(third.address, limit=5000))[: len(before)] == before
        async with worker(third.address) as one:
            await one.ask()
            await one.next(Quorum)
        after = await kinds(third.address, limit=5000)
        assert {epoch for epoch, _ in after} == {1, 2}
        async with lighthouse(store=store, lease=3.0) as restarted:
            await eventually(lambda: len(restarted.events.after("job", 0, 5000)) >= len(after))
            await third.stop()
            await eventually(lambda: restarted.term is not None)
            assert (await kinds(restarted.address, limit=5000))[: len(after)] == after
