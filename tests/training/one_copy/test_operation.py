"""Operation of a job with one copy, in real processes: what the lighthouse shows, and orders to its members.

Slow: each test trains in several processes.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from keepstep_lighthouse.quorum.events import DrainOrdered, EvictOrdered, ReplaceOrdered
from keepstep_mesh.exit_codes import EXIT_EVICTED
from keepstep_metrics.history.timeseries.timeline import State
from tests.support.jobs.one_copy_members import members
from tests.support.services.metrics_driver import metrics

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


@pytest.mark.parametrize(
    ("how", "ranks"),
    [("drain", 1), ("replace", 1), ("SIGTERM", 1), ("evict", 1), ("drain", 2), ("replace", 2), ("SIGTERM", 2)],
)
async def test_a_member_that_leaves_loses_no_step_and_a_spare_takes_its_seat(
    tmp_path: Path, how: str, ranks: int
) -> None:
    async with members(tmp_path) as job:
        others = ("m0", "m2") if ranks == 1 else ("m0",)
        count, late = len(others) + 1, tmp_path / "late"
        job.start("m1", *others, count=count, spares=1, ranks=ranks, LATE=str(late))
        await job.trains("m1", *others)
        job.start("m3", count=count, spares=1, ranks=ranks)
        await job.until(lambda: job.asks("m3"), "a spare that asks")
        seat = job.views()["m1"].shards.seat
        match how:
            case "drain":
                await job.order(DrainOrdered("m1", "a test", "test"))
            case "replace":
                await job.order(ReplaceOrdered("m1", "a test", "test"))
            case "evict":
                await job.order(EvictOrdered("m1", "a test", 0.0, "test"))
            case _:
                job.terminate("m1")
        await job.until(lambda: job.processes["m1"].poll() is not None, "the end of its rank 0")
        late.touch()
        assert await job.code("m1") == (EXIT_EVICTED if how == "evict" else 0), job.output()
        await job.trains(*others, "m3")
        assert job.views()["m3"].shards.seat == seat
        assert [one.detail["how"] for one in job.events("world_formed")] == ["fresh", "replaced"]
        await job.finish(*others, "m3")


async def test_a_spare_stands_by_until_it_has_a_seat_and_then_trains(tmp_path: Path) -> None:
    async with members(tmp_path) as job, metrics(lighthouses=(job.lighthouse.address,)) as service:

        def is_(name: str, state: State) -> bool:
            groups = service.core.jobs["default"].groups if "default" in service.core.jobs else {}
            return name in groups and groups[name].timeline.state is state

        job.start("m0", "m1", count=2, spares=1)
        await job.trains("m0", "m1")
        job.start("m2", count=2, spares=1)
        await job.until(lambda: is_("m2", State.STANDBY), "a spare that stands by")
        job.kill("m0")
        await job.trains("m1", "m2")
        await job.until(lambda: is_("m2", State.TRAINING), "a spare that trains")
        assert [one.detail["how"] for one in job.events("world_formed")] == ["fresh", "replaced"]
        await job.finish("m1", "m2")


@pytest.mark.parametrize("how", ["drain", "SIGTERM"])
async def test_a_member_and_its_keeper_that_are_told_to_leave_at_once_leave_one_after_the_other(
    tmp_path: Path, how: str
) -> None:
    async with members(tmp_path) as job:
        job.start("m0", "m1", "m2", "m3", count=4)
        await job.trains("m0", "m1", "m2", "m3")
        by_seat = {one.shards.seat: name for name, one in job.views().items()}
        member, keeper, *rest = (by_seat[seat] for seat in range(4))
        if how == "SIGTERM":
            job.terminate(member, keeper)
        else:
            await job.order(DrainOrdered(member, "a test", "test"))
            await job.order(DrainOrdered(keeper, "a test", "test"))
        assert [await job.code(one) for one in (member, keeper)] == [0, 0], job.output()
        await job.trains(*rest)
        sizes = [one.detail["ranks"] for one in job.events("world_formed")]
        assert sizes == [4, 3, 2]
        await job.finish(*rest)


async def test_a_job_whose_members_are_all_told_to_leave_ends_at_once(tmp_path: Path) -> None:
    async with members(tmp_path) as job:
        job.start("m0", "m1", count=2, ranks=2)
        await job.trains("m0", "m1")
        job.terminate("m0", "m1")
        assert [await job.code(one) for one in ("m0", "m1")] == [0, 0], job.output()


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


def inject(address: str, kind: str) -> subprocess.CompletedProcess[str]:
    """Run `keepstep inject` against the process at an address."""
    words = ("inject", kind, "--at", address.removeprefix("http://"), "--seconds", "1")
    command = [sys.executable, "-m", "keepstep_cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


async def test_each_fault_of_inject_hits_a_member_and_costs_no_committed_step(tmp_path: Path) -> None:
    """A NaN is refused, a stopped or slow member goes on, and the others train on when one ends."""
    sockets = tmp_path / "s"
    sockets.mkdir()
    async with members(tmp_path) as job:
        job.start("m0", "m1", "m2", "m3", count=4, KEEPSTEP_CHAOS=str(sockets), REFUSE="1")
        everyone = ["m0", "m1", "m2", "m3"]
        await job.trains(*everyone)

        async def hit(name: str, kind: str) -> None:
            done = await asyncio.to_thread(inject, job.views()[name].address, kind)
            assert done.returncode == 0, done.stderr

        for kind in ("nan", "gil", "clock", "slow", "freeze"):
            await hit("m1", kind)
            await job.trains(*everyone)
        assert "gradients of this rank are not finite" in job.text("m1"), job.output()
        for name, kind, code in (("m3", "exception", 1), ("m2", "kill", -signal.SIGKILL)):
            await hit(name, kind)
            assert await job.code(name) == code, job.output()
            everyone.remove(name)
            await job.trains(*everyone)
        assert "InjectedError" in job.text("m3")
        await hit("m1", "memory")
        job.kill("m1")  # perhaps it has not noticed the fault
        await job.trains("m0")
        await job.finish("m0")
