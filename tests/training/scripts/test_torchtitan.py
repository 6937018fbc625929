"""A trainer for torchft in torchtitan's shape runs on keepstep: FSDP2 in each group, kills, heals, values to log.

So does one of torchtitan's own parts, where torchtitan is installed.
"""

from __future__ import annotations

import importlib.util
import re
import signal
from pathlib import Path

import pytest

from tests.support.jobs.job import Group, Job

JOBS = Path(__file__).parents[2] / "support" / "jobs"
TORCHTITAN = importlib.util.find_spec("torchtitan")
NEEDS_TORCHTITAN = pytest.mark.skipif(
    not TORCHTITAN or not (Path(str(TORCHTITAN.origin)).parent / "experiments" / "torchft").exists(),
    reason="torchtitan 0.3 is not installed: docs/torchtitan.md has the commands",
)
IMPORTS = 300.0
"""Limit in seconds of a wait that includes the imports of torchtitan, 15 s of CPU time in each trainer."""
LINE = re.compile(r"step (\d+) groups 2 loss ([\d.]+) tokens (\d+)( writes)?")


def logged(group: Group) -> dict[int, tuple[str, ...]]:
    """Map each step of two groups to the line that a group printed after it."""
    return {int(one[1]): one.groups() for line in group.output if (one := LINE.fullmatch(line))}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", ["titan_shape.py", pytest.param("titan_parts.py", marks=NEEDS_TORCHTITAN)])
async def test_a_trainer_of_torchtitans_shape_heals_and_logs_values_of_all_groups(script: str) -> None:
    """Slow: six trainers."""
    async with Job("--initial-replicas", "2", "--verify-every", "5") as job:
        a, b = [await job.start(name, ranks=2, SCRIPTS=str(JOBS / script)) for name in ("0", "1")]
        await job.until(lambda: logged(a).keys() & logged(b).keys() >= {1, 2, 3}, "both train", IMPORTS)
        b.kill(rank=1)
        await b.exit_codes()
        before, heard = max(logged(b)), len(b.output)
        await job.start("1", ranks=2, SCRIPTS=str(JOBS / script))

        def healed() -> list[int]:
            return sorted(step for step in logged(a).keys() & logged(b).keys() if step > before + 1)

        await job.until(lambda: len(healed()) > 10, "the killed group heals and trains", IMPORTS)
        assert not [line for line in b.output[heard:] if "will not commit" in line], job.report()
        a.kill(number=signal.SIGTERM)
        b.kill(number=signal.SIGTERM)
        assert [await group.exit_codes() for group in (a, b)] == [[0, 0], [0, 0]], job.report()
        for step in healed()[:10]:  # in the last step one group leaves first
            assert logged(a)[step][:3] == logged(b)[step][:3], "loss and tokens are those of all groups"
            assert logged(a)[step][3] != logged(b)[step][3], "one group writes checkpoints"
        assert float(logged(a)[healed()[9]][1]) < float(logged(a)[1][1])
        assert not [line for line in a.output if "Traceback" in line], job.report()
