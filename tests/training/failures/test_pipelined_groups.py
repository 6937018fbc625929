"""Groups with a pipeline, FSDP2 and experts inside train as one process does that has the whole model."""

from __future__ import annotations

import json
import signal
import sys

import pytest
import torch

from tests.support.jobs import pipelined_trainer
from tests.support.jobs.job import Group, Job

pytestmark = [
    pytest.mark.training,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not pipelined_trainer.CAN_RUN, reason="this torch shards a module over one mesh only"),
]

RANKS = 4
OF_A_STAGE = RANKS // pipelined_trainer.STAGES
TRAINER = (sys.executable, pipelined_trainer.__file__)
SECONDS = 240.0
"""Limit of a wait for eight trainers."""


def groups_of_steps(group: Group) -> dict[int, int]:
    """Map each step that a group has committed to the number of groups that took part in it."""
    return {one["step"]: one["groups"] for one in group.lines if one["event"] == "committed"}


def weights(group: Group, step: int) -> dict[int, dict[str, torch.Tensor]]:
    """Return the shards that each rank of the newest start held after a step, if it has shown them."""
    return {
        one["rank"]: {name: torch.tensor(values).view(shape) for name, (shape, values) in one["weights"].items()}
        for one in group.lines
        if one["event"] == "committed" and one["step"] == step and "weights" in one
    }


def shown_by_all(step: int, *groups: Group) -> bool:
    return all(len(weights(group, step)) == RANKS for group in groups)


def assert_whole(group: Group, step: int, whole: dict[str, torch.Tensor]) -> None:
    """Check that the ranks of a group have the shards of these weights, and all of them."""
    seen: dict[str, int] = {}
    for rank, shards in weights(group, step).items():
        for name, shard in shards.items():
            expected = whole[name].chunk(OF_A_STAGE)[rank % OF_A_STAGE]
            torch.testing.assert_close(
                shard, expected, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
            )
            seen[name] = seen.get(name, 0) + shard.numel()
    assert seen == {name: one.numel() for name, one in whole.items()}


async def test_two_groups_with_pipelines_and_experts_lose_a_rank_and_train_as_one_process_does() -> None:
    """Slow: eight trainers, four of them twice."""
    async with Job("--initial-replicas", "2", "--verify-every", "5") as job:
        a, b = [await job.start(name, ranks=RANKS, launcher=TRAINER) for name in ("0", "1")]
        await job.until(lambda: shown_by_all(10, a, b), "both train", SECONDS)
        b.kill(rank=3)
        codes = await b.exit_codes()
        assert codes.pop(3) == -signal.SIGKILL
        assert set(codes) <= {1, 75}, "torch's collective failed, or keepstep noticed the death first"
        await job.until(
            lambda: list(groups_of_steps(a).values()).count(1) >= 5, "the other group goes on alone", SECONDS
        )
        await job.start("1", ranks=RANKS, launcher=TRAINER, TRAINER_SEED="7")  # only a heal makes it equal
        alone = max(step for step, groups in groups_of_steps(a).items() if groups == 1)

        def common() -> int:
            last = max(groups_of_steps(b), default=0) // pipelined_trainer.SHOWN * pipelined_trainer.SHOWN
            return last if last > alone + 10 and shown_by_all(last, a, b) and groups_of_steps(a)[last] == 2 else 0

        last = await job.until(common, "the group that was killed takes part again", SECONDS)
        taking_part = [(0, 1) if groups_of_steps(a)[step] == 2 else (0,) for step in range(1, last + 1)]
        for step in (10, last):
            whole = pipelined_trainer.whole_weights(taking_part[:step], OF_A_STAGE)
            assert_whole(a, step, whole)
            assert_whole(b, step, whole)
        moved = pipelined_trainer.whole_weights([], OF_A_STAGE)
        still = {name for name, one in moved.items() if one.equal(whole[name])}
        assert still == {"frozen.weight", "frozen.bias", "unused.weight", "unused.bias"}
        norms: dict[int, set[float]] = {}
        for one in (*a.lines, *b.lines):
            if one["event"] == "committed":
                norms.setdefault(one["step"], set()).add(one["norm"])
        assert not {step: seen for step, seen in norms.items() if len(seen) > 1}, "all ranks clip by one norm"
        events = [json.loads(line) for line in (job.logs / "events.jsonl").read_text().splitlines()]
        assert [event for event in events if event["kind"] == "replicas_verified"]
        assert not [event for event in events if event["kind"] in ("replicas_differ", "values_differ")]
        assert not [line for line in a.output if "no gradients averaged" in line], job.report()
