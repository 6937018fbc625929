"""A group that keeps failing is parted from the others: they train on without it, and it comes back when it can."""

from __future__ import annotations

import pytest

from tests.support.jobs.job import Job

pytestmark = [pytest.mark.training, pytest.mark.timeout(300)]


async def test_a_group_that_fails_by_itself_and_then_in_each_heal_does_not_keep_the_others_from_training() -> None:
    async with Job() as job:
        trouble = job.directory / "trouble"
        a, b = [await job.start(name) for name in ("a", "b")]
        c = await job.start("c", TRAINER_TROUBLE=str(trouble))
        await job.advance(a, b, c)
        trouble.write_text("own")
        await job.advance(a, b, steps=20)
        quorum = await job.order("GET", "/quorum")
        assert quorum["formed"]["numbers"]["parted"] == 1
        assert "c fails by itself: ValueError: the test lets this step fail" in quorum["formed"]["sentence"]
        replicas = {one["name"]: one for one in (await job.order("GET", "/replicas"))["replicas"]}
        assert replicas["c"]["state"] == "parted"
        assert replicas["c"]["reason"]["code"] == "parted"
        trouble.write_text("heal")
        await job.order("POST", "/replicas/c/readmit")
        await job.until(lambda: len([1 for one in c.lines[-8:] if one["event"] == "discarded"]) >= 3, "its heals fail")
        await job.advance(a, b, steps=20)
        trouble.unlink()
        await job.order("POST", "/replicas/c/readmit")
        await job.advance(a, b, c)
        job.assert_all_live()
        assert job.assert_identical() >= 40
