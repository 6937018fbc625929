"""HSDP with three groups of two ranks: a group heals whole, each shard from the same shard of one source."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.support.jobs.job import Group, Job

pytestmark = [pytest.mark.training, pytest.mark.timeout(240)]

UNITS = 3
"""Sharded modules of ``sharded_trainer.py`` with parameters."""


async def ended(group: Group, killed: int) -> None:
    """Wait for the end of a group after a SIGKILL of one rank."""
    codes = await group.exit_codes()
    assert codes.pop(killed) == -signal.SIGKILL
    assert set(codes) <= {1, 75}, "torch's collective failed, or keepstep noticed the death first"


def assert_equal(job: Job) -> int:
    """Check that groups which committed a step in one quorum hold the same shards and saw the same norm.

    Return the number of steps that all three groups committed so.
    """
    shards: dict[tuple[int, int, int], dict[str, str]] = {}
    norms: dict[tuple[int, int], set[float]] = {}
    for group in job.groups.values():
        for event in group.lines:
            if event["event"] == "committed" and event["quorum_id"] is not None:
                step = event["step"], event["quorum_id"]
                shards.setdefault((*step, event["rank"]), {})[group.name] = event["digest"]
                norms.setdefault(step, set()).add(event["norm"])
                assert event["reductions"] == UNITS, "one for each unit, however many micro-batches a step has"
    assert not {step: by_group for step, by_group in shards.items() if len(set(by_group.values())) > 1}, job.report()
    assert not {step: seen for step, seen in norms.items() if len(seen) > 1}, job.report()
    return sum(len(by_group) == 3 for by_group in shards.values()) // 2


async def test_three_sharded_groups_survive_the_death_of_any_rank_at_any_moment(tmp_path: Path) -> None:
    """Slow: three groups of two ranks, two of which start again."""
    go_on = tmp_path / "go-on"
    variables = {"TRAINER_SHARDED": "1", "TRAINER_GO_ON": str(go_on)}
    async with Job("--initial-replicas", "3", "--verify-every", "5", min_replicas=2) as job:
        a = await job.start("0", ranks=2, **variables)
        b = await job.start("1", ranks=2, **variables, TRAINER_HOLD_REDUCTION="3")
        c = await job.start("2", ranks=2, **variables)

        async def restart_b_until_it_heals() -> None:
            await job.start("1", ranks=2, backwards=True, **variables, TRAINER_HOLD_HEAL="1")
            await job.until(lambda: b.has("healing", b.ranks[1].pid), "rank 1 is in the middle of its heal")

        await job.until(lambda: b.has("reducing", b.ranks[1].pid), "the others wait for rank 1 in an all-reduce")
        b.kill(rank=1)
        await ended(b, killed=1)
        await job.advance(a, c)

        await restart_b_until_it_heals()
        b.kill(rank=1)
        await ended(b, killed=1)
        await job.advance(a, c)

        await restart_b_until_it_heals()
        a.kill(rank=1)  # b heals from the first group; rank 0 has its whole state, rank 1 a part
        go_on.touch()
        await ended(a, killed=1)
        await job.advance(b, c)

        before = assert_equal(job)
        await job.start("0", ranks=2, backwards=True, **variables)
        await job.until(lambda: assert_equal(job) >= before + 10, "all three are equal for ten steps more")

        other = await job.start("3", ranks=2, **variables, TRAINER_REVERSED="1")
        assert await other.exit_codes() == [78, 78], job.report()
        assert any("shard at (0, 0)" in line and "shard at (32, 0)" in line for line in other.output), job.report()
        await job.advance(a, b, c)
        job.groups.pop("3")
        job.assert_all_live()
        events = [json.loads(line) for line in (job.logs / "events.jsonl").read_text().splitlines()]
        assert [event for event in events if event["kind"] == "replicas_verified"]
        assert not [event for event in events if event["kind"] == "replicas_differ"]


async def test_sharded_groups_clip_the_gradients_of_a_step_that_they_repeat_after_a_loss(tmp_path: Path) -> None:
    """Slow: three groups of two ranks. The ranks 0 have reduced the second unit with the group that is lost."""
    variables = {"TRAINER_SHARDED": "1", "TRAINER_GO_ON": str(tmp_path / "go-on"), "KEEPSTEP_RETRY_ALLREDUCE": "1"}
    async with Job("--initial-replicas", "3", min_replicas=2) as job:
        a = await job.start("0", ranks=2, **variables)
        b = await job.start("1", ranks=2, **variables, TRAINER_HOLD_REDUCTION="3")
        c = await job.start("2", ranks=2, **variables)
        await job.until(lambda: b.has("reducing", b.ranks[1].pid), "the others wait for rank 1 in an all-reduce")
        b.kill(rank=1)
        await ended(b, killed=1)
        await job.advance(a, c)
        for group in (a, c):
            steps = [json.loads(line) for line in (job.logs / f"{group.name}.jsonl").read_text().splitlines()]
            assert [one["group_rank"] for one in steps if one["event"] == "retried"] in ([0, 1], [1, 0])
            assert not [one for one in steps if one["event"] == "discarded"], job.report()
        assert_equal(job)
