"""A model that exists once, in real processes that real signals end: no committed step is lost.

Slow: each test trains in several processes, some of which start again.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs.one_copy_job import OneCopyJob, told, with_a_spare
from tests.support.jobs.one_copy_kills import compare

pytestmark = [pytest.mark.training, pytest.mark.timeout(240)]


async def undisturbed(members: int, **settings: Any) -> tuple[list[Any], dict[tuple[int, int], str]]:
    async with OneCopyJob(min_replicas=members) as job:
        ends = await job.train(members, **settings)
        return told(ends), job.shards()


async def test_kills_in_every_phase_leave_the_weights_of_an_undisturbed_run(tmp_path: Path) -> None:
    steps = 16
    expected, shards = await undisturbed(3, steps=steps)
    faults = "2:1:forward,4:0:backward,6:2:copy,8:1:vote,10:0:committed,12:2:forward,12:2:reading"
    async with with_a_spare(3) as job:
        ends = await job.train(3, 1, faults=faults, steps=steps)
        assert job.faults() == 7, job.report()
        assert job.shards() == shards
        assert told(ends) == expected, job.report()


async def test_a_rank_that_dies_in_a_recovery_is_rebuilt_too_with_two_copies() -> None:
    expected, shards = await undisturbed(3, steps=6, copies=2)
    async with with_a_spare(3) as job:
        ends = await job.train(3, 1, faults="2:1:backward,2:0:serving", steps=6, copies=2)
        assert job.faults() == 2, job.report()
        assert job.shards() == shards
        assert told(ends) == expected, job.report()


async def test_a_job_without_spares_shrinks_and_grows_without_a_lost_step() -> None:
    async with OneCopyJob(min_replicas=4) as job:
        await job.train(4, kind="clip", steps=10)
        losses = job.losses()
    async with OneCopyJob("--initial-replicas", "4", min_replicas=3) as job:
        await job.train(4, kind="clip", faults="3:1:backward,7:2:vote", steps=10)
        assert job.faults() == 2, job.report()
        assert job.losses() == pytest.approx(losses, rel=1e-5)
        assert {event["world"] for event in job.groups["m0"].lines if event["event"] == "committed"} == {3, 4}


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


@pytest.mark.parametrize("kind", ["scaler", "lion", "adafactor", "muon", "tensor lr", "clip"])
async def test_all_kinds_of_steps_are_repeated_bit_for_bit(kind: str) -> None:
    """A ``GradScaler`` with an overflow in one rank, optimizers that cannot be replayed, options that are tensors, and
    clipping. All have a scheduler, and two backward passes in a step. With ``adafactor`` each rank has whole weights.
    """
    expected, shards = await undisturbed(3, kind=kind, steps=7)
    async with with_a_spare(3) as job:
        ends = await job.train(3, 1, kind=kind, faults="2:2:vote,5:0:committed", steps=7)
        assert job.faults() == 2, job.report()
        assert job.shards() == shards
        assert told(ends) == expected, job.report()
        if kind == "scaler":
            assert {one["scale"] for one in ends} == {2.0**16}, "one overflow halves it, and three steps double it"


async def test_random_kills_leave_the_weights_of_an_undisturbed_run() -> None:
    """``make kills`` has many of them."""
    await compare(6, seed=3)


@pytest.mark.parametrize("kind", ["tensor parallel", "pipeline"])
async def test_two_dimensions_survive_the_loss_of_a_member_of_two_ranks(kind: str) -> None:
    """With ``pipeline`` the ranks of a member have different modules."""
    expected, shards = await undisturbed(2, ranks=2, kind=kind, steps=6)
    async with with_a_spare(2) as job:
        ends = await job.train(2, 1, ranks=2, kind=kind, faults="2:2:backward", steps=6)
        assert job.faults() == 1, job.report()
        assert job.shards() == shards
        assert told(ends) == expected, job.report()


async def test_a_frozen_rank_disturbs_nothing_and_joins_again_when_it_goes_on() -> None:
    async with OneCopyJob(min_replicas=3) as job:
        await job.train(3, kind="clip", steps=10)
        shards, losses = job.shards(), job.losses()
    async with OneCopyJob("--heartbeat-timeout", "2", min_replicas=3) as job:
        thaw = asyncio.create_task(job.thaw_when_step_is(6))
        await job.train(3, 1, kind="clip", faults="2:1:freeze", steps=10)
        await thaw
        assert {key: value for key, value in job.shards().items() if key[0] <= 6}.items() <= shards.items()
        assert job.losses() == pytest.approx(losses, rel=1e-5), "it may be a fourth member from then on"
