"""Data that the metrics service deletes: jobs that were deleted, groups that are gone, jobs beyond what it keeps."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from contextlib import closing
from pathlib import Path

import pytest

from keepstep_mesh.protocol.policy import Policy
from keepstep_mesh.protocol.telemetry_records import read_batch
from keepstep_metrics.app import FILE
from keepstep_metrics.history import machine
from keepstep_metrics.history.machine import MetricsCore
from tests.support.services.lighthouse_driver import eventually, lighthouse, round_of, worker
from tests.support.services.metrics_driver import DEADLINE, JOB, Client, Teller, client, event, following, metrics, step

T = 1_700_000_000.0


async def lines(asking: Client, start: str) -> list[str]:
    text = (await asking.call("GET", "/metrics")).decode()
    return [line for line in text.splitlines() if line.startswith(start)]


async def test_a_deleted_job_leaves_its_deletion_only_over_a_restart_too(tmp_path: Path) -> None:
    now = time.time()
    async with metrics(data_dir=tmp_path) as one, client(one.address) as asking:
        await asking.tell(Teller(), event(now - 9, "joined", "a:1"), event(now - 9, "joined", "a:1", job="other"))
        await asking.tell(Teller("a:1"), *(step(now - 9 + at, at + 1) for at in range(5)))
        async with following(asking) as stream:
            assert (await anext(stream))[0] == "now"
            await asking.tell(Teller(), event(now - 2, "job_deleted", by="ann", evicted=[]))
            async with asyncio.timeout(DEADLINE):
                while (said := (await anext(stream))[1]).get("event") != "job_deleted":
                    pass
            assert said["detail"]["by"] == "ann"
        assert list(one.core.jobs) == ["other"]
        await asking.tell(Teller("a:1"), step(now - 3, 6))
        assert list(one.core.jobs) == ["other"], "a late record does not bring it back"
        assert not await lines(asking, 'keepstep_job_step{job="job"}')
        (left,) = (await asking.get("events"))["events"]
        assert (left["event"], left["sentence"]) == ("job_deleted", "ann deleted the job")
    async with metrics(data_dir=tmp_path) as one, client(one.address) as asking:
        assert list(one.core.jobs) == ["other"]
        await asking.tell(Teller("a:1"), step(now - 3, 7))
        assert list(one.core.jobs) == ["other"]
        await asking.tell(Teller("b:1"), step(now, 1))
        assert sorted(one.core.jobs) == ["job", "other"], "a new job of that name is another"
    with closing(sqlite3.connect(tmp_path / FILE)) as data:
        rows = data.execute("SELECT job, event FROM events ORDER BY id").fetchall()
    assert rows == [("other", "joined"), (JOB, "job_deleted")]


async def test_a_job_that_expires_at_the_lighthouse_goes_from_the_metrics_service() -> None:
    policy = Policy(min_replicas=1, reconnect_grace=0.0, job_ttl=0.3)
    async with lighthouse(policy=policy) as known, metrics(lighthouses=(known.address,)) as one:
        await eventually(lambda: one.is_registered)
        async with worker(known.address, job="short") as group:
            await round_of([group])
            await eventually(lambda: "short" in one.core.jobs)
        await eventually(lambda: "short" not in one.core.jobs)
        assert one.core.deleted["short"].sentence.startswith("the job expired, unused for ")


async def test_groups_that_are_gone_have_no_lines() -> None:
    now = time.time()
    async with metrics() as one, client(one.address) as asking:
        for number in range(150):
            name = f"g{number}:1"
            await asking.tell(Teller(), event(now - 50, "joined", name))
            await asking.tell(Teller(name), *(step(now - 40 + at, at + 1) for at in range(20)))
            kind = "left" if number % 2 else "lost"
            await asking.tell(Teller(), event(now - 10, kind, name, reason="it is done"))
        await asking.tell(Teller(), event(now - 50, "joined", "stays:1"))
        await asking.tell(Teller("stays:1"), *(step(now - 40 + at, at + 1) for at in range(20)))
        assert len(await lines(asking, "keepstep_group_step_seconds")) == 1
        assert len(await lines(asking, "keepstep_group_straggler")) <= 1


async def test_jobs_that_have_ended_have_lines_only_for_the_last_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    async with metrics() as one, client(one.address) as asking:
        for number in range(60):
            job = f"j{number}"
            await asking.tell(Teller(), event(now - 50, "joined", "a:1", job=job))
            await asking.tell(Teller("a:1", job), step(now - 40, 1))
            if number:
                await asking.tell(Teller(), event(now - 10, "left", "a:1", job=job, reason="done"))
        shown = await lines(asking, "keepstep_job_step{")
        assert len(shown) == 21, "the one at work, and 20 others"
        assert 'keepstep_job_step{job="j0"} 1.0' in shown


def tell(one: MetricsCore, now: float, job: str, kind: str, replica_id: str = "a:1") -> None:
    one.apply(read_batch(Teller().batch(event(now, kind, replica_id, job=job))), now)


def test_a_new_job_takes_the_place_of_one_that_has_ended() -> None:
    """1,100 jobs within an hour: each is known while it is at work."""
    one = MetricsCore()
    tell(one, T, "at-work", "joined")
    for number in range(1100):
        now, job = T + number, f"j{number}"
        tell(one, now, job, "joined")
        assert job in one.jobs
        tell(one, now, job, "left")
        assert len(one.jobs) <= machine.MAX_JOBS
    assert "at-work" in one.jobs


def test_jobs_at_work_keep_their_place() -> None:
    one = MetricsCore()
    for number in range(machine.MAX_JOBS + 1):
        tell(one, T + number, f"j{number}", "joined")
    assert len(one.jobs) == machine.MAX_JOBS
    assert "j0" in one.jobs
    assert one.left_out == 1


def test_deletions_that_are_remembered_are_bounded_and_outlive_a_restart() -> None:
    one = MetricsCore()
    for number in range(machine.MAX_DELETED + 10):
        tell(one, T + number, f"j{number}", "job_deleted", "")
    assert len(one.deleted) == machine.MAX_DELETED
    again = MetricsCore()
    again.load(one.dump())
    assert again.deleted == one.deleted
    before = one.dump()
    del before["deleted"]
    MetricsCore().load(before)  # as a build before this one wrote it
