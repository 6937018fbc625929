"""A group of two ranks under one or two torchruns trains with a group that was started without it."""

from __future__ import annotations

import os
import signal
import sys

import pytest

from tests.support.jobs.job import TRAINER, Group, Job
from tests.support.network.ports import free_port
from tests.support.processes.forked import FORKS

pytestmark = [pytest.mark.training, pytest.mark.timeout(240)]

SECONDS = 240.0
"""Limit of a wait for two torchruns, which meet, and import torch first."""
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


@pytest.mark.timeout(900)
async def test_a_group_of_two_torchruns_one_of_which_is_replaced_starts_again_and_heals() -> None:
    """Slow: the new torchrun counts its restarts from 0, and the other one is at 1."""
    port = free_port()
    variables = {"REPLICA_GROUP_ID": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", FORKS: "1"}

    def torchrun(node: int) -> list[str]:
        meet = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf=is_host={int(node == 0)}"]
        nodes = ["--nnodes=2", "--nproc-per-node=1", "--rdzv-id=r1", "--local-addr=127.0.0.1", "--max-restarts=3"]
        return [sys.executable, "-m", "torch.distributed.run", *nodes, *meet, str(TRAINER)]

    async with Job("--initial-replicas", "2") as job:
        a = await job.start("0", ranks=2)
        stays, dies = [await job.start(f"1-{node}", launcher=torchrun(node), **variables) for node in (0, 1)]

        def trains(group: Group, starts: int) -> bool:
            pids = started(group)
            return len(pids) == starts and commits(group, pids[-1]) >= 5

        await job.until(lambda: trains(stays, 1) and trains(dies, 1), "both train", SECONDS)
        before = commits(a, started(a)[0])
        dies.kill()
        os.kill(started(dies)[0], signal.SIGKILL)
        await job.until(lambda: commits(a, started(a)[0]) >= before + 10, "the other group goes on")
        await job.start("1-1", launcher=torchrun(1), **variables)
        await job.until(
            lambda: trains(stays, 2) and trains(dies, 2), "both ranks of the group are started again", SECONDS
        )
        for name in ("r0", "r1"):
            await job.order("POST", f"/replicas/{name}/drain", reason="the end of the test")
        assert [await group.exit_codes() for group in (a, stays, dies)] == [[0, 0], [0], [0]], job.report()
        assert job.assert_identical() > 10
