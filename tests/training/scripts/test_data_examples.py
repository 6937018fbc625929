"""examples/train_grain.py and examples/train_stream.py: a killed group heals, and all end with equal weights."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.support.jobs.job import Group, Job

EXAMPLES = Path(__file__).parents[3] / "examples"


def losses(group: Group) -> dict[int, float]:
    found = [re.match(r"step (\d+) loss ([\d.]+)", line) for line in group.output]
    return {int(one[1]): float(one[2]) for one in found if one}


@pytest.mark.parametrize(
    ("package", "script", "epochs"), [("grain", "train_grain.py", "5"), ("datasets", "train_stream.py", "1")]
)
@pytest.mark.timeout(200)
async def test_a_killed_group_goes_on_in_the_data_of_the_others(package: str, script: str, epochs: str) -> None:
    """Slow: four trainers, which import the package."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install -e '.[{package}]'")
    variables = {"SCRIPTS": str(EXAMPLES / script), "EPOCHS": epochs}
    async with Job("--initial-replicas", "3", "--verify-every", "5", min_replicas=2) as job:
        a, _, c = groups = [await job.start(name, **variables) for name in "abc"]
        await job.until(lambda: all(len(losses(group)) > 5 for group in groups), "all train")
        c.kill()
        before = max(losses(a))
        await job.until(lambda: max(losses(a)) > before + 3, "the others go on")
        await job.order("PATCH", "", min_replicas=3)  # they wait for it, however long its imports take
        await c.exit_codes()
        c.output.clear()
        await job.start("c", **variables)
        assert [await group.exit_codes() for group in groups] == [[0], [0], [0]], job.report()
        ends = [one for group in groups for one in group.lines if one["event"] == "finished"]
        assert len(ends) == 3
        assert len({(one["step"], one["digest"]) for one in ends}) == 1, "equal weights and optimizers"
        assert min(losses(c)) > before + 1, "it went on at the step of the others"
        last = max(losses(a))
        assert sum(losses(a)[step] for step in range(last - 4, last + 1)) / 5 < 0.7 * losses(a)[1], "they learn"
