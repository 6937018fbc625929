"""Groups of two ranks, each started and restarted by a torchrun of its own."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.jobs.job import Group, Job

pytestmark = [pytest.mark.training, pytest.mark.timeout(240)]

SCRIPT = Path(__file__).parents[3] / "examples" / "train_hsdp.py"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=3")


def steps(group: Group, groups: int) -> list[int]:
    """Steps that the group reported, with this number of groups in them."""
    report = re.compile(rf"step (\d+) groups {groups} ")
    return [int(found[1]) for line in group.output if (found := report.match(line))]


def ranks(group: Group) -> dict[int, psutil.Process]:
    """The processes that the torchrun of the group has started, by rank."""
    return {int(one.environ()["RANK"]): one for one in psutil.Process(group.ranks[0].pid).children()}


async def test_torchrun_restarts_all_ranks_of_a_group_that_lost_one_and_it_heals() -> None:
    """Slow: two torchruns and six trainers import torch."""
    async with Job("--initial-replicas", "2", "--verify-every", "5") as job:
        a, b = [await job.start(name, launcher=[*TORCHRUN, str(SCRIPT)], STEPS="1000000000") for name in ("0", "1")]
        await job.until(lambda: steps(a, 2) and steps(b, 2), "both train")
        before = [ranks(a), ranks(b)]
        assert [set(one) for one in before] == [{0, 1}, {0, 1}]
        before[1][1].kill()
        await job.until(lambda: steps(a, 1), "the other group goes on alone")
        seen = len(steps(b, 2))
        await job.until(lambda: len(steps(b, 2)) >= seen + 3, "the group takes part again")
        assert ranks(a) == before[0]
        assert not set(ranks(b).values()) & set(before[1].values()), "all its ranks are new"
        for name in ("r0", "r1"):
            await job.order("POST", f"/replicas/{name}/drain")
        assert [await group.exit_codes() for group in (a, b)] == [[0], [0]], job.report()
        events = [json.loads(line) for line in (job.logs / "events.jsonl").read_text().splitlines()]
        verified = [event["detail"]["step"] for event in events if event["kind"] == "replicas_verified"]
        assert max(verified) > steps(b, 2)[seen], "the shards of both groups are equal after the heal"
        assert not [event for event in events if event["kind"] == "replicas_differ"]
