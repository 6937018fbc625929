"""Groups that are killed in the last steps of a training come back, and all end with equal weights."""

from __future__ import annotations

from random import Random

import pytest

from tests.support.jobs.endings import finish_under_kills
from tests.support.jobs.job import Job

pytestmark = [pytest.mark.training, pytest.mark.timeout(300)]


async def test_groups_killed_in_each_of_the_last_steps_end_with_equal_weights():
    """Some seconds: five groups start again, one after the other. Then one comes when the job is closed."""
    async with Job() as job:
        await finish_under_kills(job, "night", Random(7))
        late = await job.start("a", KEEPSTEP_JOB="night", TRAINER_STEPS="8", TRAINER_FINISH="1")
        assert await late.exit_codes() == [80], job.report()
        assert any("4 groups finished together at step 8" in line for line in late.output), job.report()
