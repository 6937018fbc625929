"""The end of a job: an operator deletes it, or no group uses it for its ``job_ttl``."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from keepstep_lighthouse.api import prometheus
from keepstep_lighthouse.app import Lighthouse
from keepstep_lighthouse.jobs import event_log, records
from keepstep_lighthouse.jobs.expiry import OVER_SECONDS, due_at
from keepstep_lighthouse.store.contract import Compare, Write, WriteFailedError
from keepstep_lighthouse.store.memory_store import MemoryStore
from keepstep_lighthouse.store.opening import open_store
from keepstep_mesh.protocol.membership import HeldAnswer
from keepstep_mesh.protocol.messages import Closed, Evicted, Quorum, RoundBroken
from keepstep_mesh.protocol.policy import Policy
from tests.services.rest.scene import Rest
from tests.support.services.etcd_server import EtcdCluster
from tests.support.services.lighthouse_driver import (
    DEADLINE,
    Worker,
    connection,
    eventually,
    lighthouse,
    round_of,
    worker,
    workers,
)

SHORT = Policy(min_replicas=1, reconnect_grace=0.0, job_ttl=0.05)
KEPT = Policy(min_replicas=1, reconnect_grace=0.0)


@pytest.fixture(params=["sqlite", "etcd"])
def store(request: pytest.FixtureRequest, tmp_path: Path, etcd: EtcdCluster) -> str:
    """The address of a store that outlives a lighthouse."""
    return {"sqlite": f"sqlite://{tmp_path}/lighthouse.sqlite", "etcd": f"{etcd.address}/{uuid.uuid4()}"}[request.param]


@asynccontextmanager
async def served(**settings: Any) -> AsyncIterator[tuple[Lighthouse, Rest]]:
    async with lighthouse(**{"policy": KEPT, **settings}) as one, aiohttp.ClientSession() as http:
        yield one, Rest(http, one.address)


async def visit(one: Lighthouse, job: str, name: str = "r0:1") -> int:
    """One group forms a quorum and goes; the quorum_id."""
    async with worker(one.address, name, job) as group:
        (answer,) = await round_of([group])
    await eventually(lambda: not one.jobs[job].sessions and one.jobs[job].core.returning() is None)
    return answer.quorum_id


async def lines(rest: Rest, start: str = "keepstep_") -> list[str]:
    async with rest.http.get(f"{rest.address}/metrics") as answer:
        return [line for line in (await answer.text()).splitlines() if line.startswith(start)]


async def stored(address: str) -> dict[str, Any]:
    store = await open_store(address)
    try:
        return {key: json.loads(value) for key, value in (await store.get_prefix(records.JOB_PREFIX)).items()}
    finally:
        await store.close()


# ---- an operator deletes a job


async def test_a_deleted_job_is_gone_from_the_store_and_can_be_created_again(store: str) -> None:
    async with served(store=store) as (one, rest):
        assert await visit(one, "old") == 1
        await visit(one, "other")
        said = await rest.call("DELETE", "/v1/jobs/old", 202)
        assert (said["kind"], said["job"], said["done"]) == ("job_deleted", "old", True)
        assert said["detail"] == {"by": "admin at 127.0.0.1", "quorum_id": 1, "evicted": []}
        assert [view["job"] for view in (await rest.get("/v1/jobs"))["jobs"]] == ["other"]
        assert not [line for line in await lines(rest) if '"old"' in line]
        assert await visit(one, "old") > 1, "the quorum_id does not go back"
        events = (await rest.get("/v1/jobs/old/events"))["events"]
        assert "job_deleted" not in [event["kind"] for event in events]
        await rest.call("DELETE", "/v1/jobs/old", 202)
    assert list(await stored(store)) == ["jobs/other"]
    async with served(store=store) as (one, _):
        assert list(one.jobs) == ["other"]
        assert await visit(one, "third") > 2, "not after a restart either, nor under another name"


async def test_an_unknown_job_cannot_be_deleted_and_the_known_ones_are_named() -> None:
    async with served() as (one, rest):
        await visit(one, "known")
        problem = await rest.call("DELETE", "/v1/jobs/unknown", 404)
        assert problem["known"] == ["known"]
        await rest.call("DELETE", "/v1/jobs/known?force=maybe", 400)
        await rest.call("DELETE", "/v1/jobs/known", 202)
        problem = await rest.call("DELETE", "/v1/jobs/known", 404)
        assert "was deleted by admin at 127.0.0.1" in problem["detail"]


async def test_a_job_with_sessions_is_deleted_only_by_force_and_its_groups_are_evicted() -> None:
    async with served() as (one, rest), workers(one.address, 2, "job") as members:
        await round_of(members)
        problem = await rest.call("DELETE", "/v1/jobs/job", 409)
        assert "2 connected groups (r0:1, r1:1)" in problem["detail"]
        assert "force=true" in problem["detail"]
        await round_of(members, step=1)
        said = await rest.call("DELETE", "/v1/jobs/job?force=true", 202)
        assert said["detail"]["evicted"] == ["r0:1", "r1:1"]
        for member in members:
            assert "job was deleted" in (await member.until(Evicted)).reason
            await member.ended()
        assert not one.jobs
        async with connection(one.address, "r0:1") as zombie:
            await zombie.hello(quorum_id_seen=1)
            assert (await zombie.refusal()).code == "banned"
        async with worker(one.address, "r0:2") as again:
            assert (await round_of([again]))[0].quorum_id > 1


async def test_a_replica_id_that_names_no_incarnation_may_come_back_after_a_forced_deletion() -> None:
    async with served() as (one, rest):
        async with worker(one.address, "r0") as group:
            await round_of([group])
            await rest.call("DELETE", "/v1/jobs/job?force=true", 202)
            await group.until(Evicted)
        async with worker(one.address, "r0") as again:
            assert (await round_of([again]))[0].quorum_id > 1


async def test_a_group_that_joins_a_job_under_deletion_waits_and_a_second_deletion_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transact, asked, go_on = MemoryStore.transact, asyncio.Event(), asyncio.Event()

    async def slow(store: MemoryStore, compare: Sequence[Compare], writes: Sequence[Write]) -> bool:
        if any(write.value is None for write in writes):
            asked.set()
            await go_on.wait()
        return await transact(store, compare, writes)

    async with served() as (one, rest):
        await visit(one, "job")
        with monkeypatch.context() as planted:
            planted.setattr(MemoryStore, "transact", slow)
            first = asyncio.create_task(rest.call("DELETE", "/v1/jobs/job", 202))
            await asked.wait()
            assert "is being deleted" in (await rest.call("DELETE", "/v1/jobs/job?force=true", 409))["detail"]
            await rest.patch("/v1/jobs/job", {"min_replicas": 2}, 503)
            async with connection(one.address) as early:
                await early.hello()
                refused = await early.refusal()
            assert (refused.code, refused.reason) == ("not_ready", "job job is being deleted; try again")
            go_on.set()
            await first
        async with worker(one.address) as group:
            assert (await round_of([group]))[0].quorum_id > 1


async def test_a_forced_deletion_waits_for_the_write_under_way_and_its_quorum_id_is_not_given_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transact, asked, go_on = MemoryStore.transact, asyncio.Event(), asyncio.Event()

    async def slow(store: MemoryStore, compare: Sequence[Compare], writes: Sequence[Write]) -> bool:
        if not asked.is_set():
            asked.set()
            await go_on.wait()
        return await transact(store, compare, writes)

    async with served() as (one, rest), worker(one.address) as group:
        with monkeypatch.context() as planted:
            planted.setattr(MemoryStore, "transact", slow)
            await group.ask()
            await asked.wait()
            deletion = asyncio.create_task(rest.call("DELETE", "/v1/jobs/job?force=true", 202))
            await eventually(lambda: one.jobs["job"].closed)
            go_on.set()
            assert (await deletion)["detail"]["quorum_id"] == 1
        await group.until(Evicted)
        assert not one.jobs
        assert await one.store.get_prefix(records.JOB_PREFIX) == {}
        assert one.endings.floor == 2


async def test_a_group_that_may_come_back_keeps_its_job_from_being_deleted_without_force() -> None:
    async with served(policy=Policy(reconnect_grace=DEADLINE)) as (one, rest):
        async with worker(one.address) as group:
            await round_of([group])
            group.cut()
            await eventually(lambda: not one.jobs["job"].sessions)
        problem = await rest.call("DELETE", "/v1/jobs/job", 409)
        assert "r0:1" in problem["detail"]
        said = await rest.call("DELETE", "/v1/jobs/job?force=true", 202)
        assert said["detail"]["evicted"] == ["r0:1"]


async def test_a_zombie_of_a_deleted_job_never_counts_as_equal() -> None:
    async with served() as (one, rest):
        old = await visit(one, "job")
        await rest.call("DELETE", "/v1/jobs/job", 202)
        async with worker(one.address, "r1:1") as new:
            (answer,) = await round_of([new])
            assert answer.quorum_id > old
            held = HeldAnswer(epoch=1, quorum_id=old, step=0)
            async with worker(one.address, "r0:1", quorum_id_seen=old, held=held) as zombie:
                assert (await zombie.until(RoundBroken)).quorum_id == old
                await zombie.ask(1, lineage=old)
                await new.ask(1, lineage=answer.quorum_id)
                both = await new.until(Quorum)
                lineages = {member.replica_id: member.lineage for member in both.members or ()}
                assert lineages == {"r0:1": old, "r1:1": answer.quorum_id}, "so they do not count as equal"
                assert both.quorum_id > answer.quorum_id > old


async def test_a_follower_of_a_job_gets_its_end() -> None:
    async with served() as (one, rest):
        await visit(one, "job")
        after = (await rest.get("/v1/jobs/job/events"))["after"]
        async with rest.http.get(f"{rest.address}/v1/jobs/job/events?follow=1&after={after}") as stream:
            await rest.call("DELETE", "/v1/jobs/job", 202)
            async with asyncio.timeout(DEADLINE):
                text = (await stream.content.read()).decode()
        assert "event: job_deleted" in text, text


async def test_a_deletion_that_cannot_be_written_is_not_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: object) -> bool:
        raise WriteFailedError("the disk is full")

    async with served() as (one, rest):
        await visit(one, "job")
        with monkeypatch.context() as planted:
            planted.setattr(MemoryStore, "transact", full)
            await rest.call("DELETE", "/v1/jobs/job", 503)
        await eventually(lambda: one.term is not None)
        assert list(one.jobs) == ["job"]


async def test_a_lighthouse_that_follows_sends_a_deletion_to_the_leader(etcd: EtcdCluster) -> None:
    store = f"{etcd.address}/{uuid.uuid4()}"
    async with served(store=store, lease=3.0) as (leader, rest), lighthouse(store=store, lease=3.0) as follower:
        await eventually(lambda: len(leader.followers) == 1)
        await visit(leader, "job")
        asked = f"{follower.address}/v1/jobs/job?force=true"
        async with rest.http.delete(asked, allow_redirects=False) as answer:
            assert answer.headers["Location"] == f"{leader.address}/v1/jobs/job?force=true"
        async with rest.http.delete(asked) as answer:
            assert answer.status == 202, await answer.text()
        assert not leader.jobs
    assert not await stored(store)


# ---- expiry


async def test_a_job_without_sessions_is_deleted_after_its_ttl(store: str, tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    async with served(store=store, policy=SHORT, event_log=log) as (one, rest):
        async with worker(one.address, job="used") as group:
            await round_of([group])
            await visit(one, "idle")
            await eventually(lambda: "idle" not in one.jobs)
            assert list(one.jobs) == ["used"], "never one with sessions"
            assert (await rest.get("/v1/jobs/used"))["expires_in_seconds"] is None
        await eventually(lambda: not one.jobs)
    assert not await stored(store)
    ends = [event for event in map(json.loads, log.read_text().splitlines()) if event["kind"] == "job_deleted"]
    assert [(event["job"], event["detail"]["by"]) for event in ends] == [("idle", "job_ttl"), ("used", "job_ttl")]
    assert all(event["detail"]["idle_seconds"] >= 0.05 for event in ends)


async def test_the_ttl_is_a_policy_of_each_job_and_zero_is_never() -> None:
    async with served(policy=SHORT) as (one, rest):
        async with worker(one.address, job="kept") as group:
            await round_of([group])
            await rest.patch("/v1/jobs/kept", {"job_ttl": 0})
        await visit(one, "idle")
        await eventually(lambda: list(one.jobs) == ["kept"])
        assert (await rest.get("/v1/jobs/kept"))["expires_in_seconds"] is None
        changed = await rest.patch("/v1/jobs/kept", {"job_ttl": 5000})
        assert changed["policy"]["job_ttl"] == 5000
        assert 4000 < (await rest.get("/v1/jobs/kept"))["expires_in_seconds"] <= 5000
        await rest.patch("/v1/jobs/kept", {"job_ttl": -1}, 400)
        await rest.patch("/v1/jobs/kept", {"job_ttl": 0.01})
        await eventually(lambda: not one.jobs)


async def test_a_job_in_its_takeover_grace_does_not_expire(tmp_path: Path) -> None:
    store = f"sqlite://{tmp_path}/lighthouse.sqlite"
    policy = Policy(min_replicas=1, job_ttl=0.01, takeover_grace=DEADLINE)
    async with served(store=store, policy=policy) as (one, _), worker(one.address) as group:
        await round_of([group])
    async with served(store=store, policy=policy) as (one, rest):
        await eventually(lambda: due_at(one.jobs["job"].use) < time.monotonic())
        await one.endings.expire()
        assert list(one.jobs) == ["job"]
        assert "may still reconnect" in (await rest.call("DELETE", "/v1/jobs/job", 409))["detail"]


# ---- limits


async def finish(one: Lighthouse, job: str) -> None:
    """One group finishes and goes."""
    async with worker(one.address, job=job) as group:
        (answer,) = await round_of([group])
        await group.ask(1, lineage=answer.quorum_id, final=True)
        await group.until(Closed)
    await eventually(lambda: not one.jobs[job].sessions and one.jobs[job].core.returning() is None)


async def test_a_job_whose_groups_have_finished_makes_room_after_an_hour() -> None:
    async with served(max_jobs=2, policy=KEPT) as (one, _):
        for job in ("first", "second"):
            await finish(one, job)
        async with connection(one.address, job="third") as third:
            await third.hello()
            assert (await third.refusal()).code == "not_ready"
        for job in one.jobs.values():
            job.used_at -= OVER_SECONDS
        async with AsyncExitStack() as stack:
            groups = [await stack.enter_async_context(connection(one.address, f"r{n}:1", "third")) for n in range(3)]
            for group in groups:
                await group.hello()
            for group in groups:
                await group.message()
            assert list(one.jobs) == ["second", "third"], "one job makes room for all groups of the new one"


async def test_a_newcomer_beyond_the_limit_is_told_what_to_do_and_expired_jobs_make_room_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with served(max_jobs=2, policy=KEPT) as (one, rest):
        await visit(one, "first")
        await visit(one, "second")
        async with connection(one.address, job="third") as third:
            await third.hello()
            refused = await third.refusal()
        assert refused.code == "not_ready"
        for words in ("the limit of 2 jobs is reached", "keepstep job rm", "--max-jobs", "'third'"):
            assert words in refused.reason
        monkeypatch.setattr(one.endings, "wake", lambda: None)  # jobs expire only if the room is used up
        await rest.patch("/v1/jobs/first", {"job_ttl": 0.01})
        await asyncio.sleep(0.02)
        async with worker(one.address, job="third"):
            assert list(one.jobs) == ["second", "third"]


async def test_400_short_jobs_leave_bounded_lines_and_memory_and_a_new_job_is_accepted() -> None:
    async with served(max_jobs=50, policy=SHORT) as (one, rest):
        async with aiohttp.ClientSession() as http:
            gate = asyncio.Semaphore(16)

            async def come_and_go(number: int) -> None:
                async with gate:
                    while True:  # as a trainer that gets the answer to retry
                        async with http.ws_connect(f"{one.address}/v1/jobs/j{number}/session") as socket:
                            group = Worker(socket, "r0:1")
                            await group.hello()
                            if (await group.message()).kind == "welcome":
                                await round_of([group])
                                return
                        await asyncio.sleep(0.02)

            await asyncio.gather(*(come_and_go(number) for number in range(400)))
        assert len(one.jobs) <= 50
        await eventually(lambda: not one.jobs)
        async with worker(one.address, job="new") as group:
            await round_of([group])
            found = await lines(rest)
            assert len(found) < 150, len(found)
        assert 'keepstep_lighthouse_events_total{kind="joined"} 401.0' in found
        assert len(one.events.jobs) <= 2
        assert len(one.events.endings) <= 100


async def test_visits_that_never_form_a_quorum_leave_nothing() -> None:
    async with served() as (one, rest):
        before = len(await lines(rest))
        for number in range(300):
            async with worker(one.address, job=f"visit-{number}"):
                pass
        await eventually(lambda: not one.jobs and not one.sessions)
        assert len(await lines(rest)) - before < 20
        assert not [job for job in one.events.jobs if job.startswith("visit")]


async def test_idle_jobs_lose_their_lines_and_get_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prometheus, "MAX_IDLE_SHOWN", 3)
    async with served() as (one, rest):
        for number in range(10):
            await visit(one, f"j{number}")
        shown = await lines(rest, "keepstep_quorum_id")
        assert len(shown) == 3, "the last used"
        assert 'keepstep_quorum_id{job="j9"} 1.0' in shown
        async with worker(one.address, job="j0"):
            assert 'keepstep_quorum_id{job="j0"} 1.0' in await lines(rest, "keepstep_quorum_id")
            assert 'keepstep_events_total{job="j0",kind="joined"} 2.0' in await lines(rest)


async def test_the_event_lists_of_all_jobs_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "KEPT_IN_ALL", 100)
    log = event_log.EventLog()
    for number in range(1000):
        log.add(f"j{number % 7}", "note", "", {}, time.time())
        log.add("busy", "note", "", {}, time.time())
    assert sum(len(log.newest(job, 10_000)) for job in log.jobs) <= 100
    assert log.missed("busy", 1)
    assert all(log.newest(f"j{number}", 1) for number in range(7)), "the longest list gives way"
