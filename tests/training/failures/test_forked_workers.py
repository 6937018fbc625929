"""The death of a trainer is noticed at once although its DataLoader workers, which are forked, live on."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator

import pytest

from tests.support.jobs.job import Group, Job

pytestmark = [pytest.mark.training, pytest.mark.timeout(180)]

AT_ONCE = 15.0
"""Seconds, of a busy machine; the heartbeat timeout of these tests is twice as long."""
HEARTBEAT_TIMEOUT = ("--heartbeat-timeout", "30")


def pids_of_workers(group: Group) -> list[int]:
    return sorted({pid for event in group.lines if event["event"] == "workers" for pid in event["pids"]})


@contextlib.contextmanager
def stopped_workers(*groups: Group) -> Iterator[None]:
    """Within the block the workers neither run nor end, as one that reads from a slow disk. They end after it."""
    pids = [pid for group in groups for pid in pids_of_workers(group)]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
        for pid in pids:
            os.kill(pid, 0)  # raises unless it is there still
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


async def test_the_others_commit_at_once_although_the_workers_of_a_killed_trainer_live():
    async with Job(*HEARTBEAT_TIMEOUT) as job:
        a, b, c = [await job.start(name, TRAINER_WORKERS="2") for name in ("a", "b", "c")]
        await job.until(lambda: all(len(pids_of_workers(group)) == 2 for group in (a, b, c)), "all have workers")
        await job.advance(a, b, c)
        with stopped_workers(a):
            a.kill()
            await job.advance(b, c, seconds=AT_ONCE)
        await job.start("a", TRAINER_WORKERS="2")
        await job.advance(a, b, c)
        assert job.assert_identical() > 10


@pytest.mark.parametrize("rank", [0, 1])
async def test_the_other_rank_of_a_group_ends_at_once_although_the_workers_of_a_killed_one_live(rank):
    async with Job(*HEARTBEAT_TIMEOUT) as job:
        a = await job.start("a", ranks=2, TRAINER_WORKERS="2")
        await job.until(lambda: len(pids_of_workers(a)) == 4, "both ranks have workers")
        await job.advance(a)
        with stopped_workers(a):
            a.kill(rank=rank)
            await job.until(lambda: any("this process (exit 75)" in line for line in a.output), "it ends", AT_ONCE)
        assert not [line for line in a.output if "silent" in line], "it heard of the death, it did not wait for it"
        codes = await a.exit_codes()
        assert (codes[rank], codes[1 - rank]) == (-signal.SIGKILL, 75)
