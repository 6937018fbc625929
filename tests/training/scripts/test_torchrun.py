"""A group of two ranks under torchrun trains with a group that was started without it."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from tests.support.jobs.job import TRAINER, Group, Job
from tests.support.processes.forked import FORKS

pytestmark = [pytest.mark.training, pytest.mark.timeout(240)]

TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3")


def started(group: Group) -> list[int]:
    """The pids of all ranks that were started; those of the newest start come last."""
    return [event["pid"] for event in group.lines if event["event"] == "started"]


def commits(group: Group, pid: int) -> int:
    return sum(event["event"] == "committed" and event["pid"] == pid for event in group.lines)


async def test_torchrun_restarts_all_ranks_of_a_group_that_lost_one_and_it_heals() -> None:
    async with Job("--initial-replicas", "2") as job:
        a = await job.start("0", ranks=2)
        b = await job.start("1", launcher=[*TORCHRUN, str(TRAINER)], **{FORKS: "1"})
        await job.until(
            lambda: (
                [len(started(group)) for group in (a, b)] == [2, 2]
                and all(commits(group, pid) >= 3 for group in (a, b) for pid in started(group))
            ),
            "both train",
        )
        alive = started(a)
        before = commits(a, alive[0])
        os.kill(started(b)[1], signal.SIGKILL)
        await job.until(lambda: commits(a, alive[0]) >= before + 10, "the other group goes on")
        await job.until(lambda: len(started(b)) == 4, "torchrun starts both ranks again")
        await job.until(lambda: min(commits(b, pid) for pid in started(b)[2:]) >= 5, "the group takes part again")
        for name in ("r0", "r1"):
            await job.order("POST", f"/replicas/{name}/drain", reason="the end of the test")
        assert [await group.exit_codes() for group in (a, b)] == [[0, 0], [0]], job.report()
        assert started(a) == alive, "the other group was not restarted"
        assert job.assert_identical() > 10
