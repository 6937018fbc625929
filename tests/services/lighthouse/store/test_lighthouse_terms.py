"""The order of writes and answers in a term, and its end when the store fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from keepstep_lighthouse import app
from keepstep_lighthouse.app import Lighthouse, LighthouseSettings
from keepstep_lighthouse.jobs import lighthouse_node, records
from keepstep_lighthouse.jobs.job import Job
from keepstep_lighthouse.leadership import campaign, term
from keepstep_lighthouse.quorum.events import Asked, Closed, Decision, Event, EvictOrdered, Opened, Tick
from keepstep_lighthouse.quorum.job_record import WEIGHTS, Ban, Divergence, JobRecord
from keepstep_lighthouse.quorum.machine import JobCore
from keepstep_lighthouse.store.contract import (
    Compare,
    OutcomeUnknownError,
    StoreError,
    Write,
    WriteFailedError,
)
from keepstep_lighthouse.store.memory_store import MemoryStore
from keepstep_lighthouse.store.opening import open_store
from keepstep_mesh.protocol.messages import Evicted, Quorum, Welcome
from keepstep_mesh.protocol.policy import Policy
from tests.support.services.lighthouse_driver import (
    DEADLINE,
    connection,
    eventually,
    lighthouse,
    round_of,
    worker,
    workers,
)


class FaultyStore(MemoryStore):
    """A store with a fault that can be switched on: ``slow`` waits, ``failed`` and ``lost`` write nothing, ``done``
    writes; the last two do not know it."""

    def __init__(self) -> None:
        super().__init__()
        self.fault = ""
        self.go_on = asyncio.Event()
        self.tried = asyncio.Event()

    async def transact(self, compare: Sequence[Compare], writes: Sequence[Write]) -> bool:
        fault = self.fault
        if fault:
            self.tried.set()
        if fault == "slow":
            await self.go_on.wait()
        if fault == "failed":
            raise WriteFailedError("the disk is full")
        if fault == "lost":
            raise OutcomeUnknownError("the line was cut")
        held = await super().transact(compare, writes)
        if fault == "done":
            raise OutcomeUnknownError("the line was cut")
        return held


@asynccontextmanager
async def faulty_lighthouse(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Lighthouse, FaultyStore]]:
    store = FaultyStore()
    monkeypatch.setattr(app, "store_at", lambda _url: store)
    async with lighthouse(policy=Policy(min_replicas=1, reconnect_grace=DEADLINE)) as one:
        yield one, store


async def test_no_answer_goes_out_before_its_quorum_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    async with faulty_lighthouse(monkeypatch) as (one, store), workers(one.address, 2) as members:
        await round_of(members)
        store.fault = "slow"
        for member in members:
            await member.ask(0, commit_failures=1)
        async with asyncio.timeout(DEADLINE):
            await store.tried.wait()
        assert one.jobs["job"].core.record.quorum_id == 2
        async with connection(one.address, "r9:1") as late:
            await late.hello()
            waiting: list[asyncio.Task[Any]] = [asyncio.create_task(one.until(Quorum)) for one in members]
            waiting.append(asyncio.create_task(late.until(Welcome)))
            _, pending = await asyncio.wait(waiting, timeout=0.1)  # nothing tells that nothing comes
            assert len(pending) == 3
            store.go_on.set()
            *answers, welcome = await asyncio.gather(*waiting)
        assert welcome.quorum_id == 2
        assert [answer.quorum_id for answer in answers] == [2, 2]
        assert records.decode("jobs/job", (await store.get("jobs/job")) or b"").quorum_id == 2


async def test_a_confirmed_quorum_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    async with faulty_lighthouse(monkeypatch) as (one, store), workers(one.address, 2) as members:
        await round_of(members)
        store.fault = "failed"
        for step in range(1, 5):
            await round_of(members, step)
        assert not store.tried.is_set()


async def test_events_after_a_write_wait_for_it_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    async with faulty_lighthouse(monkeypatch) as (one, store), workers(one.address, 3) as members:
        await round_of(members)
        store.fault = "slow"
        async with aiohttp.ClientSession() as http:
            url = f"{one.address}/v1/jobs/job/replicas/r2/evict"
            order = asyncio.create_task(http.post(url, json={"reason": "slow disk"}))
            async with asyncio.timeout(DEADLINE):
                await store.tried.wait()
            for member in members[:2]:
                await member.ask(1)
            told = asyncio.create_task(members[2].message())
            _, pending = await asyncio.wait((order, told), timeout=0.1)  # nothing tells that nothing comes
            assert len(pending) == 2
            store.go_on.set()
            assert await told == Evicted("slow disk", 0.0)
            answer = await order
            assert answer.status == 202
            answer.release()
        for member in members[:2]:
            await member.message()
            assert (await member.next(Quorum)).quorum_id == 2


@pytest.mark.parametrize(("fault", "written"), [("failed", 1), ("lost", 1), ("done", 2)])
async def test_a_write_that_may_have_failed_is_never_announced_and_the_next_term_goes_on(
    monkeypatch: pytest.MonkeyPatch, fault: str, written: int
) -> None:
    async with faulty_lighthouse(monkeypatch) as (one, store), workers(one.address, 2) as members:
        await round_of(members)
        store.fault = fault
        for member in members:
            await member.ask(0, commit_failures=1)
        for member in members:
            await member.ended()

        assert records.decode("jobs/job", (await store.get("jobs/job")) or b"").quorum_id == written
        if fault != "done":
            await eventually(lambda: "cannot begin a term" in (one.trouble or ""))
            async with aiohttp.ClientSession() as http:
                async with http.get(f"{one.address}/readyz") as ready:
                    assert (ready.status, (await ready.json())["detail"]) == (503, one.trouble)
                async with http.get(f"{one.address}/v1/jobs") as read:
                    assert read.status == 503
                with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                    await http.ws_connect(f"{one.address}/v1/jobs/job/session")
                assert refused.value.status == 503
        store.fault = ""
        await eventually(lambda: one.term is not None)

        async with worker(one.address, epoch_seen=1, quorum_id_seen=1) as r0, worker(one.address, "r1:1") as r1:
            assert r0.welcome.epoch > 1
            answers = await round_of([r0, r1], 0, commit_failures=1)
        assert {answer.quorum_id for answer in answers} == {written + 1}


async def test_an_order_whose_write_failed_says_that_it_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    async with faulty_lighthouse(monkeypatch) as (one, store), workers(one.address, 1) as members:
        await round_of(members)
        store.fault = "lost"
        async with aiohttp.ClientSession() as http:
            url = f"{one.address}/v1/jobs/job/replicas/r0/evict"
            async with http.post(url, json={"reason": "x"}) as answer:
                assert (answer.status, "outcome of the order is unknown" in await answer.text()) == (503, True)
        await members[0].ended()
        store.fault = ""


async def test_a_store_that_hangs_ends_the_term(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (term, campaign, lighthouse_node):
        monkeypatch.setattr(module, "STORE_TIMEOUT", 0.1)
    async with faulty_lighthouse(monkeypatch) as (one, store), workers(one.address, 1) as members:
        assert one.term is not None
        before = one.term.epoch
        store.fault = "slow"
        await members[0].ask(0)
        await members[0].ended()
        store.fault = ""
        await eventually(lambda: one.term is not None)
        assert one.term.epoch > before


async def test_a_store_that_somebody_else_changed_ends_the_term(monkeypatch: pytest.MonkeyPatch) -> None:
    async with faulty_lighthouse(monkeypatch) as (one, store), workers(one.address, 1) as members:
        await store.put(term.EPOCH_KEY, b"7")
        await members[0].ask(0)
        await members[0].ended()
        await eventually(lambda: one.term is not None)
        assert one.term is not None
        assert one.term.epoch == 8


async def test_raising_the_epoch_in_a_store_that_fails_welcomes_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    async with faulty_lighthouse(monkeypatch) as (one, store):
        store.fault = "failed"
        async with connection(one.address) as stranger:
            await stranger.hello(epoch_seen=5)
            await stranger.ended()
        store.fault = ""
        await eventually(lambda: one.term is not None)
        async with worker(one.address, epoch_seen=5) as again:
            assert again.welcome.epoch == 6
        assert await store.get(term.EPOCH_KEY) == b"6"


@pytest.mark.parametrize("occasion", [Asked, Closed, Opened, EvictOrdered, Tick])
async def test_a_fault_in_the_core_ends_the_term_and_the_next_one_goes_on(
    monkeypatch: pytest.MonkeyPatch, occasion: type
) -> None:
    """Nothing is decided by a state that is half changed."""
    whole = JobCore.handle

    def broken(core: JobCore, event: Event, now: float, now_unix: float) -> list[Decision]:
        if type(event) is occasion:
            raise ZeroDivisionError("planted")
        return whole(core, event, now, now_unix)

    policy = Policy(min_replicas=1, heartbeat_timeout=0.3)
    async with lighthouse(policy=policy) as one, workers(one.address, 2) as members, aiohttp.ClientSession() as http:
        await round_of(members)
        monkeypatch.setattr(JobCore, "handle", broken)
        members[1].cut()
        if occasion is Asked:
            await members[0].ask(1)
        elif occasion is Opened:
            async with connection(one.address, "r2:1") as third:
                await third.hello()
                await third.ended()
        elif occasion is EvictOrdered:
            async with http.post(f"{one.address}/v1/jobs/job/replicas/r0/evict", json={"reason": "x"}) as answer:
                assert answer.status == 503
        await members[0].ended()
        monkeypatch.setattr(JobCore, "handle", whole)
        await eventually(lambda: one.term is not None and one.term.epoch > 1)
        async with worker(one.address, epoch_seen=1, quorum_id_seen=1) as again:
            await again.ask(1)
            assert (await again.until(Quorum)).quorum_id == 2


async def test_a_fault_behind_a_write_ends_the_term_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("planted")

    async with lighthouse() as one, worker(one.address) as member:
        with monkeypatch.context() as planted:
            planted.setattr(Job, "_announce", broken)
            await member.ask(0)
            await member.ended()
        await eventually(lambda: one.term is not None and one.term.epoch > 1)
        async with worker(one.address, epoch_seen=1) as again:
            assert again.welcome.quorum_id == 1, "what was written counts, announced or not"
            await again.ask(0)
            await again.until(Quorum)


# ---- records


def test_a_record_comes_back_as_it_was_stored() -> None:
    record = JobRecord(
        7, ("r0:a", "r1:b"), 5, Policy(2, takeover_grace=1.5), (Ban("r9", 12.5, "bad host"),), ("r8:x",),
        durable_relays=("relay-1",), diverged=(Divergence("r1:b", WEIGHTS, 6, 40),),
    )  # fmt: skip
    assert records.decode("jobs/x", records.encode(record)) == record


def test_a_record_of_a_build_that_knew_more_or_less_is_understood() -> None:
    plain = json.loads(records.encode(JobRecord(7, ("r0",))))
    plain["invented"] = plain["policy"]["invented"] = 1
    del plain["policy"]["heal_timeout"]
    assert records.decode("jobs/x", json.dumps(plain).encode()) == JobRecord(7, ("r0",))


@pytest.mark.parametrize("value", [b"", b"\xff", b"[]", b"{}", b'{"quorum_id": 1, "policy": 3, "bans": []}'])
def test_a_value_that_is_no_record_is_an_error_that_names_the_key(value: bytes) -> None:
    with pytest.raises(StoreError, match="jobs/x in the store is not the record of a job"):
        records.decode("jobs/x", value)


async def test_a_store_that_is_broken_keeps_a_lighthouse_from_starting(tmp_path: Path) -> None:
    url = f"sqlite://{tmp_path}/x.db"
    store = await open_store(url)
    await store.put("jobs/default", b"rubbish")
    await store.close()
    with pytest.raises(StoreError, match="jobs/default"):
        await Lighthouse(LighthouseSettings(bind="127.0.0.1:0", store=url)).start()
