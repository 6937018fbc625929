"""Real trainers whose process group runs in a child process, which is killed."""

from __future__ import annotations

import os
import signal

from tests.support.jobs.job import Group, Job


def child_of(group: Group) -> int:
    commits = [event for event in group.lines if event["event"] == "committed"]
    return int(commits[-1]["child"])


async def test_a_child_that_dies_costs_a_step_and_no_trainer():
    async with Job("--initial-replicas", "2", min_replicas=2) as job:
        a, b = [await job.start(name, TRAINER_BABY="1") for name in ("a", "b")]
        await job.advance(a, b)
        first = child_of(b)
        os.kill(first, signal.SIGKILL)
        await job.advance(a, b)
        assert child_of(b) != first
        job.assert_all_live()
        b.kill()
        await job.start("b", TRAINER_BABY="1")
        await job.advance(a, b)
        assert job.assert_identical() >= 10
