"""A model that exists once, in real processes that real signals end: no committed step is lost.

Slow: each test trains in several processes, some of which start again.
"""

from __future__ import annotations

import asyncio
import signal

import pytest

from keepstep_mesh.exit_codes import EXIT_STATE_LOST
from tests.support.jobs.one_copy_job import OneCopyJob, told, undisturbed, with_a_spare
from tests.support.jobs.one_copy_kills import compare

pytestmark = [pytest.mark.training, pytest.mark.timeout(240)]


STEPS = 16


async def test_kills_in_every_phase_leave_the_weights_of_an_undisturbed_run() -> None:
    expected, shards, _ = await undisturbed(3, steps=STEPS)
    faults = "2:1:forward,4:0:backward,6:2:copy,8:1:vote,10:0:committed,12:2:forward,12:2:reading"
    async with with_a_spare(3) as job:
        ends = await job.train(3, 1, faults=faults, steps=STEPS)
        assert job.faults() == 7, job.report()
        assert job.shards() == shards
        assert told(ends) == expected, job.report()


async def test_ranks_that_die_in_each_phase_of_a_recovery_are_rebuilt_too_with_two_copies() -> None:
    expected, shards, _ = await undisturbed(3, steps=STEPS)
    faults = "2:1:backward,2:0:serving,6:1:backward,6:2:configuring,10:2:backward,10:0:ending"
    async with with_a_spare(3) as job:
        ends = await job.train(3, 1, faults=faults, steps=STEPS, copies=2)
        assert job.faults() == 6, job.report()
        assert job.shards() == shards
        assert told(ends) == expected, job.report()


async def test_a_keeper_that_dies_while_it_rebuilds_a_shard_takes_it_along() -> None:
    async with OneCopyJob("--initial-replicas", "3", min_replicas=1) as job:
        variables = job.variables(3, faults="2:1:backward,2:2:serving", steps=8)
        m0, m1, m2 = [await job.start(name, **variables) for name in ("m0", "m1", "m2")]
        codes = [code for one in (m0, m1, m2) for code in await one.exit_codes()]
        assert sorted(codes) == [-signal.SIGKILL, -signal.SIGKILL, EXIT_STATE_LOST], job.report()
        assert "together with all copies of them" in job.report()


async def test_a_job_without_spares_shrinks_and_grows_without_a_lost_step_even_if_another_member_dies_in_it() -> None:
    _, _, losses = await undisturbed(3, kind="clip", steps=12)
    async with OneCopyJob("--initial-replicas", "4", min_replicas=2) as job, asyncio.TaskGroup() as tasks:
        faults = "3:1:backward,3:3:serving,7:2:vote"
        training = tasks.create_task(job.train(4, kind="clip", faults=faults, steps=12, holds="6,10"))
        for step in (6, 10):
            await job.go_on_with_all(4, step)
        await training
        assert job.faults() == 3, job.report()
        assert job.losses() == pytest.approx(losses, rel=1e-5)
        lines = [event for group in job.groups.values() for event in group.lines]
        worlds = {event["world"] for event in lines if event["event"] == "committed"}
        assert {2, 3} & worlds, worlds  # 3 if the first member is back before the second one is missed
        assert 4 in worlds, worlds


async def test_each_sample_of_real_data_is_in_one_committed_step_while_the_job_shrinks_and_grows() -> None:
    """The digits of scikit-learn, from a DataLoader with a worker: 537 samples, nine steps in an epoch."""
    async with OneCopyJob("--initial-replicas", "4", min_replicas=3) as job:
        await job.train(4, kind="digits", faults="3:1:backward,8:2:vote,13:0:forward", steps=20)
        assert job.faults() == 3, job.report()
        steps = job.samples()
        assert {event["world"] for event in job.groups["m3"].lines if event["event"] == "committed"} == {3, 4}
    for epoch in range(2):
        drawn = [sample for step in range(9 * epoch + 1, 9 * epoch + 10) for sample in steps[step]]
        assert sorted(drawn) == list(range(537))
    assert steps[1] != steps[10], "each epoch has another order"


@pytest.mark.parametrize("kind", ["scaler", "lion", "adafactor", "muon", "tensor lr", "clip", "torch 2.12"])
async def test_all_kinds_of_steps_are_repeated_bit_for_bit(kind: str) -> None:
    """A ``GradScaler`` with an overflow in one rank, optimizers that cannot be replayed, options that are tensors, and
    clipping. All have a scheduler, and two backward passes in a step. With ``adafactor`` each rank has whole weights.
    In torch before 2.13, FSDP2 has no ``reset_iter_state``: each loss calls ``build`` again.
    """
    expected, shards, _ = await undisturbed(3, kind=kind, steps=7)
    async with with_a_spare(3) as job:
        ends = await job.train(3, 1, kind=kind, faults="2:2:vote,5:0:committed", steps=7)
        assert job.faults() == 2, job.report()
        assert job.shards() == shards
        assert told(ends) == expected, job.report()
        if kind == "scaler":
            assert {one["scale"] for one in ends} == {2.0**16}, "one overflow halves it, and three steps double it"


async def test_random_kills_leave_the_weights_of_an_undisturbed_run() -> None:
    """``make kills`` has many of them. ``compare`` asserts that the shards of each step are equal."""
    job = await compare(6, seed=3)
    assert len(job.done) == 6


@pytest.mark.parametrize("kind", ["tensor parallel", "pipeline"])
async def test_two_dimensions_survive_the_loss_of_a_member_of_two_ranks(kind: str) -> None:
    """With ``pipeline`` the ranks of a member have different modules."""
    expected, shards, _ = await undisturbed(2, ranks=2, kind=kind, steps=6)
    async with with_a_spare(2) as job:
        ends = await job.train(2, 1, ranks=2, kind=kind, faults="2:2:backward", steps=6)
        assert job.faults() == 1, job.report()
        assert job.shards() == shards
        assert told(ends) == expected, job.report()


async def test_a_frozen_rank_disturbs_nothing_and_joins_again_when_it_goes_on() -> None:
    _, shards, losses = await undisturbed(3, kind="clip", steps=12)
    async with OneCopyJob("--heartbeat-timeout", "2", min_replicas=3) as job:
        thaw = asyncio.create_task(job.thaw_when_step_is(6))
        await job.train(3, 1, kind="clip", faults="2:1:freeze", steps=12)
        await thaw
        assert {key: value for key, value in job.shards().items() if key[0] <= 6}.items() <= shards.items()
        assert job.losses() == pytest.approx(losses, rel=1e-5), "it may be a fourth member from then on"
