"""A group joins without a stall: the others train on while its state arrives, and when it dies then."""

from __future__ import annotations

from pathlib import Path

from tests.support.jobs.job import Job, discarded


async def test_the_others_train_on_while_a_group_joins_and_when_it_dies_in_the_middle(tmp_path: Path) -> None:
    """Takes long because two trainers start after the others: one dies, the other one catches up."""
    settings = {"TRAINER_CATCH_UP": "1", "TRAINER_BATCH_NORM": "1", "TRAINER_PACE": "0.01"}
    hold = {"TRAINER_CHUNK_SECONDS": "0", "TRAINER_HOLD_HEAL_AT": "1", "TRAINER_PAUSE_FILE": str(tmp_path / "go-on")}
    async with Job() as job:
        a = await job.start("a", **settings)
        await job.advance(a)
        b = await job.start("b", **settings, **hold)
        await job.until(lambda: sum(one["event"] == "followed" for one in b.lines) >= 20, "b follows the others")
        assert not discarded(a), "a waits for nothing while the state of b does not arrive"
        b.kill()
        await job.advance(a)
        await job.start("b", **settings)
        await job.advance(a, b)
        assert job.assert_identical() >= 5
        followed = (job.logs / "b.jsonl").read_text()
        assert (followed.count('"caught_up"'), followed.count('"healed"')) == (1, 0)
