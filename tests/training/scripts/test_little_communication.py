"""The examples of LocalSGD and DiLoCo: a group that is killed heals, and all groups end with the same weights."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest

from tests.support.jobs.job import Group, Job

pytestmark = [pytest.mark.training, pytest.mark.timeout(200)]

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
STREAMING = "--sync-every 12 --fragments 2 --delay 2 --alpha 0.5 --steps"


def losses(group: Group) -> list[float]:
    return [float(found[1]) for line in group.output if (found := re.search(r"step \d+ groups 2 loss ([\d.]+)", line))]


def compared(job: Job) -> set[str]:
    events = [json.loads(line)["kind"] for line in (job.logs / "events.jsonl").read_text().splitlines()]
    return {kind for kind in events if kind.startswith("replica")}


@pytest.mark.parametrize(
    ("script", "ranks", "variables", "verified"),
    [
        ("train_local_sgd", 1, {"STEPS": "60"}, set()),
        ("train_diloco", 1, {"ARGUMENTS": f"{STREAMING} 120 --codec two-bit"}, {"replicas_verified"}),
        ("train_diloco", 2, {"ARGUMENTS": f"{STREAMING} 16 --codec quantized"}, {"replicas_verified"}),
    ],
    ids=["local_sgd", "diloco", "diloco-sharded"],
)
async def test_a_group_that_is_killed_heals_and_all_end_equal(script, ranks, variables, verified) -> None:
    """Parameters, the parameters after the last outer step, and the outer optimizer; of each shard."""
    async with Job("--initial-replicas", "2", "--verify-every", "1", min_replicas=2) as job:
        variables = {**variables, "SCRIPTS": str(EXAMPLES / f"{script}.py")}
        a, b = [await job.start(name, ranks=ranks, **variables) for name in ("0", "1")]
        await job.until(lambda: len(losses(b)) >= 3, "both train")
        b.kill(rank=ranks - 1)
        assert (await b.exit_codes())[-1] == -signal.SIGKILL
        b = await job.start("1", ranks=ranks, **variables)
        for group in (a, b):
            assert await group.exit_codes() == [0] * ranks, job.report()
        digests = [
            [e["digest"] for e in group.lines if e["event"] == "finished" and e["pid"] == one.pid]
            for rank in range(ranks)
            for group, one in ((a, a.ranks[rank]), (b, b.ranks[rank]))
        ]
        assert digests[::2] == digests[1::2]
        assert all(digests)
        assert losses(a)[-1] < losses(a)[0]
        assert compared(job) == verified
