"""Trainers of Transformers from PyPI in groups of one rank and of several: a killed group heals, and all end alike."""

from __future__ import annotations

import importlib.util
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.jobs.job import Group, Job

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="transformers is not installed: pip install -e '.[transformers]'",
)

IMPORTS = 200.0
"""Limit in seconds of a wait that includes the imports of Transformers, 7 s of CPU time in each trainer."""
EXAMPLES = Path(__file__).parents[3] / "examples"
SCRIPT, SHARDED = EXAMPLES / "train_transformers.py", EXAMPLES / "train_transformers_fsdp2.py"
RANKS, LOOP = (Path(__file__).with_name(name) for name in ("transformers_ranks.py", "accelerate_ranks.py"))


def losses(group: Group) -> dict[int, str]:
    """Map each step to the loss of all samples that a group printed after it."""
    found = [re.fullmatch(r"step (\d+) eval_loss ([\d.]+)", line) for line in group.output]
    return {int(one[1]): one[2] for one in found if one}


@pytest.mark.timeout(600)
async def test_a_killed_group_heals_and_all_groups_end_with_equal_weights(tmp_path: Path) -> None:
    """Slow: Transformers is imported in four trainers."""
    variables = {"SCRIPTS": str(SCRIPT), "CHECKPOINTS": str(tmp_path), "NUM_REPLICA_GROUPS": "3", "STEPS": "160"}
    async with Job("--initial-replicas", "3", min_replicas=2) as job:
        a, b, c = groups = [await job.start(name, **variables) for name in "012"]
        await job.until(lambda: all(map(losses, groups)), "all train", IMPORTS)
        c.kill()
        before = max(losses(a))
        await job.until(lambda: max(losses(a)) > before, "the others go on")
        await job.order("PATCH", "", min_replicas=3)  # they wait for it, however long its imports take
        await c.exit_codes()
        c.output.clear()
        await job.start("2", **variables)
        await job.until(lambda: losses(c), "the killed group heals and trains", IMPORTS)
        assert [await group.exit_codes() for group in groups] == [[0], [0], [0]], job.report()
        ends = [one for group in groups for one in group.lines if one["event"] == "finished"]
        assert {one["step"] for one in ends} == {160}
        assert len({one["digest"] for one in ends}) == 1, "equal weights and optimizers"
        assert min(losses(c)) > before
        assert all(losses(c)[step] == losses(a)[step] == losses(b)[step] for step in losses(c))
        # at step 20 the model knows how frequent each byte is (3.1); the time it needs to use the bytes before varies
        # with rounding and dropout, in a plain Trainer too: 2.5 to 2.94 at step 160
        assert float(losses(a)[160]) < 0.97 * float(losses(a)[20]), "they learn"
        last = {line for group in groups for line in group.output if line.startswith("ended at step")}
        assert last == {"ended at step 160, best checkpoint-160"}


def evaluations(group: Group) -> dict[float, str]:
    """Map the epoch of each evaluation that the Trainer of a group printed to its loss."""
    found = [re.match(r"\{'eval_loss': '([\d.]+)'.*'epoch': '([\d.e-]+)'\}", line) for line in group.output]
    return {float(one[2]): one[1] for one in found if one}


def ends(group: Group) -> list[dict[str, Any]]:
    """The last line of each rank."""
    lines = {line["pid"]: line for line in group.lines if line["event"] == "finished"}
    return [lines[rank.pid] for rank in group.ranks]


@pytest.mark.timeout(900)
async def test_a_group_of_two_ranks_heals_rank_by_rank_after_the_kill_of_one(tmp_path: Path) -> None:
    """Slow: Transformers is imported in six trainers."""
    variables = {"SCRIPTS": str(SHARDED), "CHECKPOINTS": str(tmp_path), "NUM_REPLICA_GROUPS": "2", "STEPS": "80"}
    async with Job("--initial-replicas", "2", min_replicas=1) as job:
        a, b = groups = [await job.start(name, ranks=2, **variables) for name in "01"]
        await job.until(lambda: all(map(evaluations, groups)), "both train", IMPORTS)
        b.kill(rank=1)
        assert await b.exit_codes() == [75, -signal.SIGKILL], "the rank that is left ends too"
        before = max(evaluations(a))
        await job.until(lambda: max(evaluations(a)) > before, "the other group goes on")
        await job.order("PATCH", "", min_replicas=2)  # it waits for the group, however long its imports take
        b.output.clear()
        await job.start("1", ranks=2, **variables)
        await job.until(lambda: evaluations(b), "the killed group heals and trains", IMPORTS)
        assert [await group.exit_codes() for group in groups] == [[0, 0], [0, 0]], job.report()
        shards = [[end["digest"] for end in ends(group)] for group in groups]
        assert {end["step"] for group in groups for end in ends(group)} == {80}
        assert shards[0] == shards[1], "equal shards of weights and optimizers, rank by rank"
        assert shards[0][0] != shards[0][1]
        assert min(evaluations(b)) > before
        assert all(evaluations(b)[epoch] == evaluations(a)[epoch] for epoch in evaluations(b))
    best = min(evaluations(a).values(), key=float)
    assert float(best) < 3.3, "a Trainer alone on four ranks comes to 3.1: it knows how frequent each byte is"
    assert (tmp_path / "final" / "model.safetensors").exists()


async def end(job: Job, groups: list[Group], step: int) -> None:
    """Wait until all ranks have evaluated after ``step``, and ended."""
    start = f'{{"step": {step}, '

    def evaluated(group: Group) -> bool:
        return sum(line.startswith(start) for line in group.output) == len(group.ranks)

    await job.until(lambda: all(map(evaluated, groups)), f"step {step}", IMPORTS)
    assert [set(await group.exit_codes()) for group in groups] == [{0}] * len(groups), job.report()


@pytest.mark.timeout(900)
async def test_groups_of_two_ranks_train_what_the_package_alone_trains_on_four(tmp_path: Path) -> None:
    """With clipping, unequal numbers of tokens, and a resume from shards. Slow: imports Transformers in 12 trainers."""
    alone, output = tmp_path / "alone.pt", str(tmp_path / "output")
    async with Job("--initial-replicas", "2", min_replicas=2) as job:
        program = (sys.executable, str(RANKS))
        variables = {"PLAIN": "1", "OUTPUT": str(tmp_path / "plain"), "WEIGHTS": str(alone)}
        plain = await job.start("alone", ranks=4, launcher=program, **variables)
        await end(job, [plain], 8)
        for name, options in {"first": {"STOP": "4"}, "second": {"RESUME": "1"}}.items():
            groups = [
                await job.start(
                    number, ranks=2, launcher=program, NUM_REPLICA_GROUPS="2", KEEPSTEP_JOB=name, OUTPUT=output,
                    WEIGHTS=str(tmp_path / f"{number}.pt"), **options,
                )
                for number in "01"
            ]  # fmt: skip
            await end(job, groups, int(options.get("STOP", "8")))
    expected, *found = [torch.load(tmp_path / f"{name}.pt") for name in ("alone", "0", "1")]
    for name, weights in expected.items():
        torch.testing.assert_close(found[0][name], weights, rtol=1e-3, atol=1e-4)
        assert found[0][name].equal(found[1][name])


@pytest.mark.timeout(900)
async def test_groups_in_float16_skip_the_same_updates_and_save_a_checkpoint_before_the_first_one(
    tmp_path: Path,
) -> None:
    """torch creates the state of the optimizer in the group that saves. Slow: imports Transformers in 4 trainers."""
    async with Job("--initial-replicas", "2", min_replicas=2) as job:
        groups = [
            await job.start(
                number, ranks=2, launcher=(sys.executable, str(RANKS)), NUM_REPLICA_GROUPS="2", LOSS_SCALE="1e6",
                OUTPUT=str(tmp_path / "output"), WEIGHTS=str(tmp_path / f"{number}.pt"),
            )
            for number in "01"
        ]  # fmt: skip
        await end(job, groups, 8)
    for group in groups:
        overflows = sorted(line for line in group.output if line.startswith("overflow in step"))
        assert overflows == [f"overflow in step {step}" for step in range(1, 9) for _rank in range(2)]
    assert (tmp_path / "output" / "checkpoint-4").exists()


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("variables", "saved"),
    [
        ({}, "saved after step 0, skipped False"),
        ({"LOSS_SCALE": "1024"}, "saved after step 0, skipped False"),
        ({"LOSS_SCALE": "3e38", "SAVE_AFTER": "1"}, "saved after step 1, skipped True"),
    ],
    ids=["float32", "before the first scale", "after an overflow"],
)
async def test_a_checkpoint_of_accelerate_before_the_first_update_leaves_the_group_in_step(
    tmp_path: Path, variables: dict[str, str], saved: str
) -> None:
    """Only one group saves, and torch creates the state of its optimizer. Slow: imports Accelerate in 4 trainers."""
    async with Job("--initial-replicas", "2", min_replicas=2) as job:
        groups = [
            await job.start(
                number, ranks=2, launcher=(sys.executable, str(LOOP)), NUM_REPLICA_GROUPS="2",
                OUTPUT=str(tmp_path / "checkpoint"), **variables,
            )
            for number in "01"
        ]  # fmt: skip
        ranks = [rank for group in groups for rank in group.ranks]
        await job.until(lambda: all(rank.exit_code is not None for rank in ranks), "the groups end", IMPORTS)
        assert [await group.exit_codes() for group in groups] == [[0, 0], [0, 0]], job.report()
    ends = [line for group in groups for line in group.output if line.startswith("ends at step 8 ")]
    assert len(ends) == 4
    assert len(set(ends)) == 1, "equal weights, states of the optimizer, and loss scales"
    assert [line for line in groups[0].output if line.startswith("saved")] == [saved] * 2
    assert any((tmp_path / "checkpoint" / "optimizer_0").iterdir())


def test_the_page_begins_with_the_script() -> None:
    page = (EXAMPLES.parent / "docs" / "transformers-ranks.md").read_text()
    assert f"```python\n{SHARDED.read_text()}```" in page
