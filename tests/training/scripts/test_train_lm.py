"""examples/train_lm.py learns, heals a killed group, and resumes after the whole job was killed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.jobs.job import Group, Job

SCRIPT = Path(__file__).parents[3] / "examples" / "train_lm.py"


def losses(group: Group) -> dict[int, float]:
    """Map each step to the last loss that a group printed for it."""
    found = [re.fullmatch(r"step (\d+) loss ([\d.]+)", line) for line in group.output]
    return {int(one[1]): float(one[2]) for one in found if one}


def step(group: Group) -> int:
    return max(losses(group), default=0)


@pytest.mark.timeout(240)
async def test_a_killed_group_heals_and_a_killed_job_resumes_with_the_next_batch(tmp_path: Path) -> None:
    """Slow: two trainers start two and three times."""
    saved = tmp_path / "saved"
    variables = {"SCRIPTS": str(SCRIPT), "CHECKPOINTS": str(saved), "STEPS": "60"}
    async with Job("--initial-replicas", "2", min_replicas=2) as job:  # no step without both
        a, b = [await job.start(name, **variables) for name in ("0", "1")]
        await job.until(lambda: step(b) >= 5, "both train")
        b.kill()
        await b.exit_codes()
        await job.start("1", **variables)
        await job.until(lambda: step(a) >= 30 and step(b) >= 30, "the killed group heals and trains")
        a.kill()
        b.kill()
        await a.exit_codes()
        await b.exit_codes()
        last = int(max(saved.glob("step-*.pt")).stem.removeprefix("step-"))
        assert last >= 25

        for group in (a, b):
            await job.start(group.name, **variables)
        assert [await group.exit_codes() for group in (a, b)] == [[0], [0]], job.report()
        for group in (a, b):
            assert f"resumed after step {last}, at sample {last * 64}" in group.output, job.report()
            assert step(group) == 60
            assert losses(group)[60] < 0.6 * losses(a)[1], "it learns"
        ends = [one["digest"] for group in (a, b) for one in group.lines if one["event"] == "finished"]
        assert len(ends) == 2
        assert ends[0] == ends[1], "equal weights and optimizers"
