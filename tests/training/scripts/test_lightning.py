"""Trainers of Lightning from PyPI in groups of one rank and of several: a killed group heals, and all end alike."""

from __future__ import annotations

import importlib.util
import re
import signal
import sys
from pathlib import Path

import pytest

from tests.support.jobs.job import Group, Job

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="lightning is not installed: pip install -e '.[lightning]'"
)

IMPORTS = 200.0
"""Limit in seconds of a wait that includes the imports of Lightning, 7 s of CPU time in each trainer."""
EXAMPLES = Path(__file__).parents[3] / "examples"
SCRIPT, SHARDED = EXAMPLES / "train_lightning.py", EXAMPLES / "train_lightning_fsdp2.py"


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


@pytest.mark.timeout(600)
async def test_a_group_that_starts_after_the_backbone_has_thawed_trains_it_too() -> None:
    """Slow: Lightning is imported in three trainers."""
    script = Path(__file__).with_name("lightning_finetuning.py")
    variables = {"SCRIPTS": str(script), "NUM_REPLICA_GROUPS": "2"}
    async with Job("--initial-replicas", "2", min_replicas=2) as job:
        a, b = await job.start("0", **variables), await job.start("1", **variables, STOPS="1")
        await job.until(lambda: "thawed" in b.output, "one has trained the backbone", IMPORTS)
        b.kill()
        await b.exit_codes()
        b.output.clear()
        await job.start("1", **variables)
        assert [await group.exit_codes() for group in (a, b)] == [[0], [0]], job.report()
        ends = [[line for line in group.output if line.startswith("ended at 16: ")] for group in (a, b)]
        assert len(ends[0]) == 1
        assert ends[0] == ends[1]
        assert ends[0][0].endswith("[0.1, 0.02] True")
        digests = [one["digest"] for group in (a, b) for one in group.lines if one["event"] == "finished"]
        assert len(digests) == 2
        assert len(set(digests)) == 1, "equal weights and momentum"


def without_keepstep(folder: Path) -> Path:
    """Write the script with Lightning's own strategy, and return its path."""
    plain = folder / "plain.py"
    plain.write_text(
        SHARDED.read_text()
        .replace("from keepstep.integrations.lightning import Keepstep", "from lightning.pytorch.strategies import ")
        .replace("=KeepstepModelParallelStrategy(", "=ModelParallelStrategy(")
    )
    return plain


@pytest.mark.timeout(900)
async def test_a_group_of_two_ranks_heals_rank_by_rank_after_the_kill_of_one(tmp_path: Path) -> None:
    """Slow: Lightning is imported in ten trainers. Lightning alone trains the same model on four ranks."""
    plain = without_keepstep(tmp_path)
    variables = {"CHECKPOINTS": str(tmp_path / "groups"), "NUM_REPLICA_GROUPS": "2", "EPOCHS": "30"}
    async with Job("--initial-replicas", "2", min_replicas=1) as job:
        a, b = groups = [await job.start(name, ranks=2, SCRIPTS=str(SHARDED), **variables) for name in "01"]
        await job.until(lambda: all(map(epochs, groups)), "both train", IMPORTS)
        b.kill(rank=1)
        assert await b.exit_codes() == [75, -signal.SIGKILL], "the rank that is left ends too"
        before = max(epochs(a))
        await job.until(lambda: max(epochs(a)) >= before + 2, "the other group goes on")
        await job.order("PATCH", "", min_replicas=2)  # it waits for the group, however long its imports take
        b.output.clear()
        await job.start("1", ranks=2, SCRIPTS=str(SHARDED), **variables)
        await job.until(lambda: epochs(b), "the killed group heals and trains", IMPORTS)
        assert [await group.exit_codes() for group in groups] == [[0, 0], [0, 0]], job.report()
        lines = {line["pid"]: line for group in groups for line in group.lines if line["event"] == "finished"}
        ends = [[lines[rank.pid] for rank in group.ranks] for group in groups]
        assert len({end["step"] for group in ends for end in group}) == 1
        shards = [[end["digest"] for end in group] for group in ends]
        assert shards[0] == shards[1], "equal shards of weights and optimizers, rank by rank"
        assert shards[0][0] != shards[0][1]
        assert min(epochs(b)) > before, "it went on in the epoch of the others"
        assert all(epochs(b)[epoch] == epochs(a)[epoch] for epoch in epochs(b))
        last = {line for group in groups for line in group.output if line.startswith("ended at step")}
        assert len(last) == 1, "EarlyStopping and ModelCheckpoint decided alike on all ranks"
        assert files(tmp_path / "groups") == 2, "one group wrote, and removed older ones"
        options = {**variables, "CHECKPOINTS": str(tmp_path / "alone")}
        alone = await job.start("alone", ranks=4, launcher=(sys.executable, str(plain)), **options)
        await job.until(lambda: sum("ended at step" in one for one in alone.output) == 4, "it ends", IMPORTS)
        assert await alone.exit_codes() == [0] * 4, job.report()
    best, expected = [min(float(one[2]) for one in epochs(group).values()) for group in (a, alone)]
    assert abs(best - expected) < 0.1


@pytest.mark.timeout(600)
@pytest.mark.parametrize("wish", ["early_stopping", "should_stop"])
async def test_one_rank_of_one_group_stops_all_ranks_of_all_groups_at_one_step(wish: str) -> None:
    """Slow: Lightning is imported in four trainers. The sanity check of a group waits for no other group."""
    script = str(Path(__file__).with_name("lightning_decisions.py"))
    async with Job("--initial-replicas", "2", min_replicas=2) as job:

        async def start(name: str) -> Group:
            return await job.start(name, ranks=2, SCRIPTS=script, NUM_REPLICA_GROUPS="2", WISH=wish)

        def checked(group: Group) -> list[str]:
            return [line for line in group.output if line.startswith("sanity check")]

        groups = [await start("0")]
        await job.until(lambda: len(checked(groups[0])) == 2, "both ranks have checked their validation", IMPORTS)
        groups.append(await start("1"))
        await job.until(
            lambda: all(any("ended" in one for one in group.output) for group in groups), "it ends", IMPORTS
        )
        assert [await group.exit_codes() for group in groups] == [[0, 0], [0, 0]], job.report()
    for group in groups:
        assert checked(group) == ["sanity check ends at step 0, in step None"] * 2, "before the first quorum"
        assert [line for line in group.output if line.startswith("ended")] == ["ended at step 5"] * 2


@pytest.mark.timeout(900)
async def test_a_group_of_two_ranks_resumes_from_shards_of_lightning_as_lightning_does(tmp_path: Path) -> None:
    """Slow: Lightning is imported in six trainers."""
    plain = str(without_keepstep(tmp_path))
    async with Job("--initial-replicas", "1") as job:

        async def start(name: str, script: str, epochs: int, **variables: str) -> Group:
            folder = {"CHECKPOINTS": str(tmp_path / name), "EPOCHS": str(epochs), **variables}
            return await job.start(name, ranks=2, launcher=(sys.executable, script), NUM_REPLICA_GROUPS="1", **folder)

        async def end(group: Group) -> None:
            await job.until(lambda: sum("ended at step" in one for one in group.output) == 2, "it ends", IMPORTS)
            assert await group.exit_codes() == [0, 0], job.report()

        await end(await start("first", plain, 2))
        (saved,) = (tmp_path / "first").glob("*=60.ckpt")
        assert saved.is_dir(), "a file of each rank"
        groups = [
            await start(name, script, 4, RESUME=str(saved)) for name, script in (("0", str(SHARDED)), ("a", plain))
        ]
        for group in groups:
            await end(group)
        assert epochs(groups[0]) == epochs(groups[1])
        assert len(epochs(groups[0])) == 2


def test_the_page_begins_with_the_script() -> None:
    page = (EXAMPLES.parent / "docs" / "lightning-ranks.md").read_text()
    assert f"```python\n{SHARDED.read_text()}```" in page
