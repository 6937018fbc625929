"""Spares take the places of groups that are lost, that an operator replaces, and that get a notice of preemption."""

from __future__ import annotations

import signal

import pytest

from tests.support.jobs.job import Group, Job, discarded
from tests.support.jobs.spares import stands_by, with_spares

pytestmark = [pytest.mark.training, pytest.mark.timeout(300)]

OF_TWO = with_spares(2)


async def start_three(job: Job) -> tuple[list[Group], Group]:
    """Start three groups. Return the two that train, and the spare."""
    started = [await job.start(name, **OF_TWO) for name in ("a", "b", "c")]
    await job.until(lambda: sum(group.step() > 0 for group in started) == 2, "two groups train")
    (spare,) = [group for group in started if group.step() == 0]
    await stands_by(job, spare.name)
    return [group for group in started if group is not spare], spare


async def test_spares_take_the_places_of_groups_that_are_killed_replaced_or_preempted() -> None:
    async with Job("--join-timeout", "30", "--heartbeat-timeout", "30") as job:
        (first, second), spare = await start_three(job)
        await job.advance(first, second)
        assert spare.step() == 0, "it waits before its first step"

        first.kill()
        await first.gone()
        await job.until(lambda: spare.step() > 0, "the spare trains", seconds=10.0)
        await job.start(first.name, **OF_TWO, KEEPSTEP_NOTICE_SEC="60")
        await stands_by(job, first.name)
        await job.advance(second, spare)
        failed = len(discarded(second, spare))

        event = await job.order("POST", f"/replicas/{second.name}/replace", reason="bad fan")
        assert event["kind"] == "replace"
        assert event["sentence"] == f"a spare takes the place of {event['replica_id']}, which then leaves"
        assert await second.exit_codes() == [0]
        assert second.lines[-1]["reason"] == "replaced: bad fan"
        await job.advance(first, spare)

        with pytest.raises(Exception, match=f"{spare.name} cannot be replaced: no spare is ready; start spares"):
            await job.order("POST", f"/replicas/{spare.name}/replace", reason="bad fan")
        await job.start(second.name, **OF_TWO)
        await stands_by(job, second.name)
        before = first.step()
        first.kill(number=signal.SIGTERM)
        assert await first.exit_codes() == [0]
        assert first.lines[-1]["reason"] == "replaced: SIGTERM with 60 s of notice"
        assert second.step() > before, "it left after the spare had committed"
        await job.advance(second, spare)

        assert len(discarded(first, second, spare)) == failed, job.report()
        kinds = [event["kind"] for event in (await job.order("GET", "/events"))["events"]]
        assert (kinds.count("spare_in"), kinds.count("lost"), kinds.count("left")) == (3, 1, 2)
        assert job.assert_identical() > 10
