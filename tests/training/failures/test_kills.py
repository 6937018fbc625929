"""Real groups, really killed, frozen and parted while they train; after each all weights are bit-identical."""

from __future__ import annotations

import json
import signal
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from keepstep_chaos.histories.reading import check_files
from keepstep_chaos.histories.report import violation_lines
from tests.support.jobs.job import Group, Job, discarded

pytestmark = [pytest.mark.training, pytest.mark.timeout(300)]


def events(log: Path) -> list[str]:
    return [json.loads(line)["event"] for line in log.read_text().splitlines()]


async def test_a_killed_group_costs_no_restart_and_comes_back_equal():
    async with Job() as job:
        a, b, c = [await job.start(name) for name in ("a", "b", "c")]
        await job.until(
            lambda: len(a.committed().keys() & b.committed().keys() & c.committed().keys()) > 3, "all train"
        )
        for victim in (c, a):
            survivors = [g for g in (a, b, c) if g is not victim]
            victim.kill()
            await job.advance(*survivors)
            assert [g.ranks[0].exit_code for g in survivors] == [None, None]
            await job.start(victim.name)
            await job.advance(a, b, c)
        assert job.assert_identical() > 20


async def test_no_group_discards_a_step_in_which_another_one_is_killed_with_retry_allreduce(tmp_path):
    """``make faults`` kills fifty groups, at any moment of a step."""
    retry = {"KEEPSTEP_RETRY_ALLREDUCE": "1", "TRAINER_PAUSE_FILE": str(tmp_path / "never")}
    async with Job("--initial-replicas", "3") as job:
        a, b, c = [
            await job.start(name, TRAINER_HOLD_AT=at, **retry) for name, at in {"a": "-1", "b": "16", "c": "8"}.items()
        ]
        for victim in (c, b):
            pid = victim.ranks[0].pid
            await job.until(partial(victim.has, "holding", pid), f"{victim.name} is in the middle of a step")
            victim.kill()
        await job.advance(a)
        assert not discarded(a, b)
        assert events(job.logs / "a.jsonl").count("retried") == 2
        assert events(job.logs / "b.jsonl").count("retried") == 1
        assert job.assert_identical() > 10


async def test_two_groups_killed_together_leave_the_third_training():
    async with Job() as job:
        a, b, c = [await job.start(name) for name in ("a", "b", "c")]
        await job.advance(a, b, c)
        a.kill()
        b.kill()
        await job.advance(c)
        await job.start("a")
        await job.start("b")
        await job.advance(a, b, c)
        assert job.assert_identical() >= 10


async def test_a_frozen_group_is_left_behind_and_heals_when_it_goes_on():
    async with Job("--heartbeat-timeout", "1.5") as job:
        a, b = [await job.start(name) for name in ("a", "b")]
        await job.advance(a, b)
        b.kill(number=signal.SIGSTOP)
        await job.advance(a, steps=10)
        b.kill(number=signal.SIGCONT)
        await job.advance(a, b)
        assert job.assert_identical() >= 5
        assert b.ranks[0].exit_code is None


async def test_a_trainer_whose_main_thread_holds_the_gil_for_3_seconds_is_not_given_up():
    async with Job() as job:
        a, b = [await job.start(name) for name in ("a", "b")]
        await job.advance(a, b)
        b.kill(number=signal.SIGUSR1)
        await job.until(lambda: any(e["event"] == "held" for e in b.lines), "b has the GIL back")
        await job.advance(a, b)
        batches = [e["batches"] for e in a.lines if e["event"] == "committed" and e["step"] > min(b.committed())]
        assert {later - earlier for earlier, later in pairwise(batches)} == {2}, "b took part in every step"
        assert not discarded(a, b)


async def test_a_group_that_is_late_takes_over_the_weights_of_the_others():
    async with Job() as job:
        a = await job.start("a")
        await job.advance(a, steps=20)
        b = await job.start("b")
        await job.until(b.step, "the late one commits")
        await job.advance(a, b)
        assert min(b.committed()) > 20
        assert job.assert_identical() >= 5


async def one_is_killed_and_comes_back(survivor: str, victim: str, **trainer: str) -> int:
    """Require equal weights after every step; return how many states were compared."""
    async with Job() as job:
        living, dying = [await job.start(name, **trainer) for name in (survivor, victim)]
        await job.advance(living, dying)
        dying.kill()
        await job.advance(living)
        await job.start(victim, **trainer)
        await job.advance(living, dying)
        return job.assert_identical()


async def test_batch_norm_and_its_counters_stay_equal_over_kills():
    assert await one_is_killed_and_comes_back("a", "b", TRAINER_BATCH_NORM="1") >= 8


async def test_a_synchronous_quorum_heals_before_the_step():
    assert await one_is_killed_and_comes_back("b", "a", TRAINER_SYNC="1") >= 8


async def test_groups_parted_at_an_equal_step_do_not_go_on_with_different_weights(tmp_path):
    pause = {"TRAINER_PAUSE_AT": "6,60", "TRAINER_PAUSE_FILE": str(tmp_path / "go-on")}

    def is_at(group: Group, step: int) -> bool:
        return any((event["event"], event["step"]) == ("paused", step) for event in group.lines if "step" in event)

    async with Job("--heartbeat-timeout", "1.5", "--initial-replicas", "2") as job:
        a, b = [await job.start(name, **pause) for name in ("a", "b")]
        await job.until(lambda: is_at(a, 6) and is_at(b, 6), "both are at step 6")
        b.kill(number=signal.SIGSTOP)
        (tmp_path / "go-on-6").touch()
        await job.until(lambda: is_at(a, 60), "a is at step 60, alone")
        a.kill(number=signal.SIGSTOP)
        b.kill(number=signal.SIGCONT)
        await job.until(lambda: is_at(b, 60), "b is at step 60, alone")
        assert a.committed()[60] != b.committed()[60], "they were to be apart"
        (tmp_path / "go-on-60").touch()
        a.kill(number=signal.SIGCONT)
        await job.until(lambda: len([s for s in a.committed() if s > 60 and s in b.committed()]) > 5, "together again")
        together = [s for s in a.committed() if s > 60 and s in b.committed()]
        assert all(a.committed()[s] == b.committed()[s] for s in together)


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_dies_takes_its_group_along_and_the_group_comes_back(rank):
    async with Job() as job:
        a = await job.start("a", ranks=2)
        b = await job.start("b", ranks=2)
        await job.advance(a, b)
        b.kill(rank=rank)
        codes = await b.exit_codes()
        assert codes[rank] == -signal.SIGKILL
        assert codes[1 - rank] == 75
        await job.advance(a)
        await job.start("b", ranks=2)
        await job.advance(a, b)
        assert job.assert_identical() >= 10
        assert a.committed(0).items() & a.committed(1).items()


async def test_the_lighthouse_dies_and_comes_back_and_no_trainer_exits():
    async with Job() as job:
        a, b = [await job.start(name) for name in ("a", "b")]
        await job.advance(a, b)
        for _ in range(2):
            await job.stop_lighthouse()
            await job.start_lighthouse()
            await job.advance(a, b)
        job.assert_all_live()
        assert job.assert_identical() >= 10


async def test_a_store_restored_from_a_backup_does_not_stop_the_job():
    async with Job("--takeover-grace", "1") as job:
        store = job.directory / "lighthouse.db"
        a, b = [await job.start(name) for name in ("a", "b")]
        await job.advance(a, b)
        await job.stop_lighthouse(signal.SIGTERM)
        backup = store.read_bytes()
        await job.start_lighthouse()
        b.kill()  # quorums of which the backup knows nothing
        await job.advance(a)
        await job.start("b")
        await job.advance(a, b)
        await job.stop_lighthouse()
        for file in job.directory.glob(f"{store.name}*"):
            file.unlink()
        store.write_bytes(backup)
        await job.start_lighthouse()
        await job.advance(a, b)
        job.assert_all_live()
        assert job.assert_identical() >= 10
        # the lighthouse gave out numbers again until a group reported higher ones; the groups' own logs are right
        (job.logs / "events.jsonl").rename(job.directory / "events")
        report = check_files([job.logs])
        assert report.fine, violation_lines(report)
        job.check_history = lambda: None


async def test_a_second_process_of_the_same_name_waits_for_the_first():
    async with Job() as job:
        a = await job.start("a")
        b = await job.start("b")
        await job.advance(a, b)
        twin = await job.start("twin", REPLICA_GROUP_ID="a")
        await job.until(lambda: any(e["event"] == "started" for e in twin.lines), "the twin is connected")
        await job.advance(a, b, steps=20)
        assert not twin.committed()
        a.kill()
        await job.advance(b, twin)
        assert job.assert_identical() >= 10


async def test_a_job_of_fixed_length_ends_by_itself():
    async with Job(min_replicas=2) as job:
        groups = [await job.start(name, TRAINER_STEPS="20") for name in ("a", "b")]
        for group in groups:
            assert await group.exit_codes() == [0], job.report()
        assert groups[0].committed()[20] == groups[1].committed()[20]
