"""Operation of a job with one copy, in real processes: what the lighthouse shows, and orders to its members.

Slow: each test trains in several processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from keepstep_chaos.histories.reading import check_files
from keepstep_lighthouse.app import Lighthouse
from keepstep_lighthouse.quorum.events import DrainOrdered, PolicyOrdered, ReplaceOrdered
from keepstep_lighthouse.quorum.views.replicas import ReplicaView
from tests.support.jobs.spares import with_spares
from tests.support.services.lighthouse_driver import lighthouse as in_loop

pytestmark = [pytest.mark.training, pytest.mark.timeout(240)]

SCRIPT = Path(__file__).parents[2] / "support" / "jobs" / "one_copy_member.py"
SECONDS = 120.0


class Members:
    """Processes of members, and the lighthouse of their job."""

    def __init__(self, lighthouse: Lighthouse, folder: Path) -> None:
        self.lighthouse, self.folder = lighthouse, folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, *names: str, count: int, spares: int = 0, **variables: str) -> None:
        for name in names:
            environment = {
                **os.environ,
                "KEEPSTEP_LIGHTHOUSE": self.lighthouse.address,
                "REPLICA_GROUP_ID": name,
                "STOP": str(self.folder / "stop"),
                **with_spares(count, spares),
                "KEEPSTEP_STEP_LOG": str(self.folder / f"{name}.jsonl"),
                "RANK": "0",
                "WORLD_SIZE": "1",
                **variables,
            }
            with (self.folder / f"{name}.out").open("wb") as out:
                self.processes[name] = subprocess.Popen(
                    [sys.executable, str(SCRIPT)], env=environment, stdout=out, stderr=subprocess.STDOUT
                )

    def output(self) -> str:
        return "\n".join(f"--- {one}\n{(self.folder / f'{one}.out').read_text()[-3000:]}" for one in self.processes)

    async def until(self, condition: Any, what: str) -> None:
        try:
            async with asyncio.timeout(SECONDS):
                while not condition():  # noqa: ASYNC110  other processes make it true
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise AssertionError(f"never: {what}\n{self.output()}") from None

    @property
    def core(self) -> Any:
        return self.lighthouse.jobs["default"].core

    def views(self) -> dict[str, ReplicaView]:
        if "default" not in self.lighthouse.jobs:
            return {}
        return {one.name: one for one in self.core.replicas(0.0) if one.member and one.shards is not None}

    def events(self, *kinds: str) -> list[Any]:
        return [one for one in self.lighthouse.events.newest("default", 500) if one.kind in kinds]

    def steps(self, name: str) -> list[dict[str, Any]]:
        lines = (self.folder / f"{name}.out").read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith('{"step"')]

    async def trains(self, *names: str) -> None:
        """Wait until exactly these members have committed steps together."""
        await self.until(lambda: sorted(self.views()) == sorted(names), f"members {names}")
        before = {name: len(self.steps(name)) for name in names}
        await self.until(lambda: all(len(self.steps(one)) > before[one] + 2 for one in names), f"steps of {names}")

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    async def code(self, name: str) -> int:
        await self.until(lambda: self.processes[name].poll() is not None, f"the end of {name}")
        return self.processes[name].wait()

    async def finish(self, *names: str) -> None:
        """Let the members finish. The step logs must show that no step was lost or taken twice."""
        (self.folder / "stop").touch()
        assert [await self.code(name) for name in names] == [0] * len(names), self.output()
        report = check_files(sorted(self.folder.glob("*.jsonl")))
        assert not report.violations, report.violations
        assert not self.events("went_back", "shards_lost")


@contextlib.asynccontextmanager
async def members(folder: Path) -> AsyncIterator[Members]:
    async with in_loop() as lighthouse:
        one = Members(lighthouse, folder)
        try:
            yield one
        finally:
            for process in one.processes.values():
                process.kill()
                process.wait()


async def test_the_lighthouse_shows_seats_keepers_and_recoveries_and_the_steps_are_checked(tmp_path: Path) -> None:
    async with members(tmp_path) as job:
        job.start("m0", "m1", "m2", count=3)
        await job.trains("m0", "m1", "m2")
        views = job.views()
        assert sorted(one.shards.seat for one in views.values()) == [0, 1, 2]
        assert all(one.shards.ranks == 3 and one.shards.how == "fresh" for one in views.values())
        by_seat = {one.shards.seat: one for one in views.values()}
        assert all(one.shards.keepers == (by_seat[(seat + 1) % 3].replica_id,) for seat, one in by_seat.items())
        await job.until(lambda: all(one.shards.copies_bytes > 0 for one in job.views().values()), "sizes of copies")
        assert job.core.quorum_view(0.0).exposed == ()
        job.kill("m1")
        await job.trains("m0", "m2")
        (last,) = [one.detail for one in job.events("world_formed") if one.detail["how"] == "resized"]
        assert (last["former_ranks"], last["ranks"]) == (3, 2)
        assert last["seconds"] > 0
        await job.finish("m0", "m2")


async def test_a_member_is_exposed_while_its_keeper_has_no_memory_and_an_order_to_leave_waits(tmp_path: Path) -> None:
    async with members(tmp_path) as job:
        job.start("m0", count=2)
        job.start("m1", count=2, MEMORY="1")
        await job.trains("m0", "m1")
        await job.until(lambda: job.core.quorum_view(0.0).exposed, "an exposed member")
        (sentence,) = job.core.quorum_view(0.0).exposed
        assert sentence.startswith("m0:")
        assert "is exposed: its keeper m1:" in sentence
        await order(job, DrainOrdered("m0", "a test", "test"))
        await job.trains("m0", "m1")
        assert job.processes["m0"].poll() is None, "its shard would be lost"


@pytest.mark.parametrize("how", ["drain", "replace", "SIGTERM"])
async def test_a_member_that_leaves_loses_no_step_and_a_spare_takes_its_seat(tmp_path: Path, how: str) -> None:
    async with members(tmp_path) as job:
        job.start("m0", "m1", "m2", count=3, spares=1)
        await job.trains("m0", "m1", "m2")
        job.start("m3", count=3, spares=1)
        await job.until(lambda: job.core.quorum_view(0.0).spares, "a spare")
        seat = job.views()["m1"].shards.seat
        match how:
            case "drain":
                await order(job, DrainOrdered("m1", "a test", "test"))
            case "replace":
                await order(job, ReplaceOrdered("m1", "a test", "test"))
            case _:
                job.processes["m1"].send_signal(signal.SIGTERM)
        assert await job.code("m1") == 0, job.output()
        await job.trains("m0", "m2", "m3")
        assert job.views()["m3"].shards.seat == seat
        assert [one.detail["how"] for one in job.events("world_formed")] == ["fresh", "replaced"]
        await job.finish("m0", "m2", "m3")


async def test_a_drain_without_a_spare_shrinks_the_world_and_loses_no_step(tmp_path: Path) -> None:
    async with members(tmp_path) as job:
        job.start("m0", "m1", "m2", count=3)
        await job.trains("m0", "m1", "m2")
        await order(job, DrainOrdered("m2", "a test", "test"))
        assert await job.code("m2") == 0, job.output()
        await job.trains("m0", "m1")
        await job.finish("m0", "m1")


async def test_min_replicas_of_all_members_waits_for_a_replacement(tmp_path: Path) -> None:
    async with members(tmp_path) as job:
        job.start("m0", "m1", "m2", count=3)
        await job.trains("m0", "m1", "m2")
        await change_policy(job, min_replicas=3)
        job.kill("m1")
        await job.until(lambda: len(job.core.quorum_view(0.0).asking) == 2, "two members wait")
        job.start("m1", count=3)
        await job.trains("m0", "m1", "m2")
        assert {one["ranks"] for name in ("m0", "m1", "m2") for one in job.steps(name)} == {3}
        await job.finish("m0", "m1", "m2")


async def order(job: Members, event: Any) -> None:
    await job.lighthouse.jobs["default"].order(event)


async def change_policy(job: Members, **changes: Any) -> None:
    await order(job, PolicyOrdered(replace(job.core.record.policy, **changes), "test"))
