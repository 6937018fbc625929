"""Losses that come together, and networks and scripts that fail, in real processes: each has a named result.

Slow: each test trains in several processes, some of which start again.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from keepstep_mesh.exit_codes import EXIT_STATE_LOST
from tests.support.jobs.one_copy_members import members

pytestmark = [pytest.mark.training, pytest.mark.timeout(240)]


@pytest.mark.parametrize("copies", [1, 2])
async def test_a_member_that_is_killed_with_its_keeper_is_lost_unless_another_one_keeps_it(
    tmp_path: Path, copies: int
) -> None:
    async with members(tmp_path) as job:
        job.start("m0", "m1", "m2", "m3", count=4, COPIES=str(copies))
        await job.trains("m0", "m1", "m2", "m3")
        names = [job.seats()[seat] for seat in (1, 2)]
        left = [job.seats()[seat] for seat in (0, 3)]
        for name in names:
            job.processes[name].send_signal(signal.SIGKILL)
        if copies == 2:
            await job.trains(*left)
            await job.finish(*left)
            return
        for name in left:
            assert await job.code(name) == EXIT_STATE_LOST, job.output()
            said = job.text(name).partition("together with all copies of them: ")[2]
            assert said.startswith(f"{names[0]}:"), job.text(name)
            assert f"(kept by {names[1]}:" in said


async def test_members_that_pause_return_at_once_or_only_stand_by_disturb_nothing(tmp_path: Path) -> None:
    async with members(tmp_path) as job:
        job.start("m0", "m1", "m2", count=3, spares=1)
        await job.trains("m0", "m1", "m2")
        job.start("m3", count=3, spares=1)
        await job.until(lambda: job.core.quorum_view(0.0).spares, "a spare")
        job.kill("m3")
        await job.until(lambda: not job.core.quorum_view(0.0).spares, "the spare is gone")
        await job.trains("m0", "m1", "m2")
        job.processes["m1"].send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{job.processes['m1'].pid}/stat")
        await job.until(lambda: ") T " in stat.read_text(), "m1 is frozen")
        job.processes["m1"].send_signal(signal.SIGCONT)
        await job.trains("m0", "m1", "m2")
        assert [one.detail["how"] for one in job.events("world_formed")] == ["fresh"]
        job.kill("m1")
        job.start("m1", count=3, spares=1)
        await job.trains("m0", "m1", "m2")
        await job.finish("m0", "m1", "m2")


async def test_a_build_that_gives_another_model_in_a_rank_after_a_loss_waits_for_the_lost_member(tmp_path: Path) -> None:
    async with members(tmp_path) as job:
        job.start("m0", "m1", count=3)
        job.start("m2", count=3, WIDTH_IN_WORLD="2:24")
        await job.trains("m0", "m1", "m2")
        job.kill("m1")
        reason = "no step possible; waiting for other members reason=build() returns another model than before"
        await job.until(lambda: all(reason in job.text(name) for name in ("m0", "m2")), "both say so")
        steps = len(job.steps("m0"))
        job.start("m1", count=3)
        await job.trains("m0", "m1", "m2")
        assert job.steps("m0")[steps]["step"] == job.steps("m0")[steps - 1]["step"] + 1, "no step is lost"
        await job.finish("m0", "m1", "m2")


async def test_members_that_do_not_fill_the_mesh_wait_and_say_for_what(tmp_path: Path) -> None:
    async with members(tmp_path) as job:
        mesh = '{"fsdp": -1, "tp": 2}'
        job.start("m0", count=1, MESH=mesh)
        reason = "the mesh of the training script needs a multiple of 2 groups"
        await job.until(lambda: reason in job.text("m0"), "the member says so")
        assert reason in job.core.quorum_view(0.0).reason.sentence
        job.start("m1", count=1, MESH=mesh)
        await job.trains("m0", "m1")
        await job.finish("m0", "m1")
