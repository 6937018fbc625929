"""examples/train_lightning.py with Lightning from PyPI: a killed group heals, and all end alike."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.support.jobs.job import Group, Job

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="lightning is not installed: pip install -e '.[lightning]'"
)

IMPORTS = 200.0
"""Limit in seconds of a wait that includes the imports of Lightning, 7 s of CPU time in each trainer."""
SCRIPT = Path(__file__).parents[3] / "examples" / "train_lightning.py"


def epochs(group: Group) -> dict[int, tuple[str, ...]]:
    """Map each epoch to the step and the loss that a group printed after it."""
    found = [re.fullmatch(r"epoch (\d+) step (\d+) val_loss ([\d.]+)", line) for line in group.output]
    return {int(one[1]): one.groups() for one in found if one}


def files(folder: Path) -> int:
    return len(list(folder.iterdir()))


@pytest.mark.timeout(600)
async def test_a_killed_group_heals_and_all_groups_end_with_equal_weights(tmp_path: Path) -> None:
    """Slow: Lightning is imported in four trainers."""
    variables = {"SCRIPTS": str(SCRIPT), "CHECKPOINTS": str(tmp_path), "NUM_REPLICA_GROUPS": "3", "EPOCHS": "30"}
    async with Job("--initial-replicas", "3", min_replicas=2) as job:
        a, b, c = groups = [await job.start(name, **variables) for name in "012"]
        await job.until(lambda: all(map(epochs, groups)), "all train", IMPORTS)
        c.kill()
        before = max(epochs(a))
        await job.until(lambda: max(epochs(a)) >= before + 2, "the others go on")
        await job.order("PATCH", "", min_replicas=3)  # they wait for it, however long its imports take
        await c.exit_codes()
        c.output.clear()
        await job.start("2", **variables)
        await job.until(lambda: epochs(c), "the killed group heals and trains", IMPORTS)
        assert [await group.exit_codes() for group in groups] == [[0], [0], [0]], job.report()
        ends = [one for group in groups for one in group.lines if one["event"] == "finished"]
        assert len({(one["step"], one["digest"]) for one in ends}) == 1, "equal weights and optimizers"
        assert min(epochs(c)) > before, "it went on in the epoch of the others"
        assert all(epochs(c)[epoch] == epochs(a)[epoch] == epochs(b)[epoch] for epoch in epochs(c))
        assert float(epochs(a)[max(epochs(a))][2]) < 0.5 * float(epochs(a)[0][2]), "they learn"
        assert max(epochs(a)) < 29, "EarlyStopping ended all groups at one step"
        last = [line for group in groups for line in group.output if line.startswith("ended at step")]
        assert len(last) == 3
        assert len(set(last)) == 1, "ModelCheckpoint decided alike"
        assert files(tmp_path) == 2, "one group wrote, and removed older ones"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("interval", ["step", "epoch"])
async def test_a_heal_at_the_end_of_fit_steps_no_schedule(interval: str) -> None:
    """Slow: Lightning is imported in three trainers. OneCycleLR raises an error in the step after its last one."""
    script = Path(__file__).with_name("lightning_end.py")
    variables = {"SCRIPTS": str(script), "NUM_REPLICA_GROUPS": "2", "INTERVAL": interval}
    async with Job("--initial-replicas", "2", "--finish-grace", "300", min_replicas=1) as job:
        a, b = await job.start("0", **variables), await job.start("1", **variables, STOPS="1")
        await job.until(lambda: "last step" in b.output, "one is about to take its last step", IMPORTS)
        b.kill()
        await b.exit_codes()
        b.output.clear()
        await job.start("1", **variables)
        assert [await group.exit_codes() for group in (a, b)] == [[0], [0]], job.report()
        ends = [[line for line in group.output if line.startswith("ended at 8: ")] for group in (a, b)]
        assert len(ends[0]) == 1
        assert ends[0] == ends[1]
