"""A group that does something else than training for longer than ``join_timeout``, such as an evaluation."""

from __future__ import annotations

import pytest

from tests.support.jobs.job import Group, Job, discarded

pytestmark = [pytest.mark.training, pytest.mark.timeout(300)]

PAUSE_AT = 20


async def start(job: Job, names: str, **environment: str) -> list[Group]:
    """Groups that begin together, and the first of which stops after a step to evaluate."""
    pauses = {"TRAINER_PAUSE_AT": str(PAUSE_AT), "TRAINER_PAUSE_FILE": str(job.directory / "evaluated")}
    groups = [await job.start(name, **environment, **(pauses if name == "a" else {})) for name in names]
    await job.until(lambda: all(group.step() for group in groups), "all train together")
    await job.order("PATCH", "", min_replicas=1)
    await job.until(lambda: any(event["event"] == "paused" for event in groups[0].lines), "a evaluates")
    return groups


async def test_of_two_groups_the_other_waits_without_limit_and_discards_its_batches() -> None:
    async with Job("--join-timeout", "1", min_replicas=2) as job:
        a, b = await start(job, "ab", KEEPSTEP_QUORUM_TIMEOUT_SEC="1")
        before = len(discarded(b))
        await job.until(lambda: len(discarded(b)) >= before + 3, "b asks in vain")
        assert b.step() == PAUSE_AT, "one of two groups is no majority"
        (job.directory / f"evaluated-{PAUSE_AT}").touch()
        await job.advance(a, b, steps=10)
        job.assert_all_live()
        assert job.assert_identical() > 0


async def test_of_two_groups_the_other_waits_in_start_quorum_if_that_is_synchronous() -> None:
    async with Job("--join-timeout", "1", min_replicas=2) as job:
        a, b = await start(job, "ab", KEEPSTEP_QUORUM_TIMEOUT_SEC="1", TRAINER_SYNC="1")
        before = len(discarded(b))
        await job.until(lambda: sum("asking again" in line for line in b.output) >= 3, "b asks in vain")
        assert b.step() == PAUSE_AT
        (job.directory / f"evaluated-{PAUSE_AT}").touch()
        await job.advance(a, b, steps=10)
        job.assert_all_live()
        assert len(discarded(b)) == before
        assert job.assert_identical() > 0


async def test_of_three_groups_the_others_go_on_and_the_one_heals() -> None:
    async with Job("--join-timeout", "1", min_replicas=3) as job:
        a, b, c = await start(job, "abc")
        await job.advance(b, c, steps=20)
        assert a.step() == PAUSE_AT
        (job.directory / f"evaluated-{PAUSE_AT}").touch()
        await job.advance(a, b, c, steps=10)
        job.assert_all_live()
        assert job.assert_identical() > 0
        healed = (job.logs / "a.jsonl").read_text().count('"healed"')
        assert healed >= 1, "it takes over the steps that it missed"
