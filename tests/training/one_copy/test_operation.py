"""Operation of a job with one copy, in real processes: what the lighthouse shows, and orders to its members.

Slow: each test trains in several processes.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from keepstep_lighthouse.quorum.events import DrainOrdered, ReplaceOrdered
from tests.support.jobs.one_copy_members import members

pytestmark = [pytest.mark.training, pytest.mark.timeout(240)]


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
        await job.order(DrainOrdered("m0", "a test", "test"))
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
                await job.order(DrainOrdered("m1", "a test", "test"))
            case "replace":
                await job.order(ReplaceOrdered("m1", "a test", "test"))
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
        await job.order(DrainOrdered("m2", "a test", "test"))
        assert await job.code("m2") == 0, job.output()
        await job.trains("m0", "m1")
        await job.finish("m0", "m1")


async def test_min_replicas_of_all_members_waits_for_a_replacement(tmp_path: Path) -> None:
    async with members(tmp_path) as job:
        job.start("m0", "m1", "m2", count=3)
        await job.trains("m0", "m1", "m2")
        await job.change_policy(min_replicas=3)
        job.kill("m1")
        await job.until(lambda: len(job.core.quorum_view(0.0).asking) == 2, "two members wait")
        job.start("m1", count=3)
        await job.trains("m0", "m1", "m2")
        assert {one["ranks"] for name in ("m0", "m1", "m2") for one in job.steps(name)} == {3}
        await job.finish("m0", "m1", "m2")
