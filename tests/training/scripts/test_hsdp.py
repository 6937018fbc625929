"""HSDP: FSDP2 and tensor parallelism inside each group, keepstep between the groups."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

from tests.support.jobs.job import Group, Job

SCRIPT = Path(__file__).parents[3] / "examples" / "train_hsdp.py"


def losses(group: Group) -> list[float]:
    return [float(found[1]) for line in group.output if (found := re.search(r"groups 2 loss ([\d.]+)", line))]


async def test_two_groups_with_two_shards_and_tensor_parallelism_heal_and_end_equal() -> None:
    """Slow: eight trainers, four of them twice."""
    variables = {"SCRIPTS": str(SCRIPT), "TP": "2", "STEPS": "1000000000"}
    async with Job("--initial-replicas", "2", "--verify-every", "5", min_replicas=2) as job:
        a, b = [await job.start(name, ranks=4, **variables) for name in ("0", "1")]
        await job.until(lambda: len(losses(a)) >= 3, "both train")
        b.kill(rank=3)
        assert (await b.exit_codes())[3] == -signal.SIGKILL
        seen = len(losses(a))
        await job.start("1", ranks=4, **variables)
        await job.until(lambda: len(losses(a)) >= seen + 3, "the group that was killed takes part again")
        a.kill(number=signal.SIGTERM)
        b.kill(number=signal.SIGTERM)
        assert [set(await group.exit_codes()) for group in (a, b)] == [{0}, {0}], job.report()
        assert losses(a)[-1] < losses(a)[0]
        events = [json.loads(line) for line in (job.logs / "events.jsonl").read_text().splitlines()]
        assert [event for event in events if event["kind"] == "replicas_verified"]
        assert not [event for event in events if event["kind"] == "replicas_differ"]
