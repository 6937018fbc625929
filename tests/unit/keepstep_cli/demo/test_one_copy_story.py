"""`keepstep demo --one-copy`: kills only when a spare stands by, and success only with equal shards."""

from __future__ import annotations

from typing import Any

from keepstep_cli.demo.one_copy_story import Run, summary

RANKS, EVERY = 2, 10


def job(*, spare: bool = True) -> Run:
    run = Run(RANKS)
    for member in ("r0", "r1", "r2") if spare else ("r0", "r1"):
        run.heard(member, f"{member}:4a4f is ready", 0.0)
    train(run, range(1, 11))
    return run


def train(run: Run, steps: range, members: tuple[str, ...] = ("r0", "r1"), now: float = 1.0) -> None:
    for step in steps:
        for rank, member in enumerate(members):
            run.heard(member, f"rank {rank} of {len(members)} step {step} loss 0.{step}", now)


def end(run: Run, step: int, *shards: str) -> Run:
    for rank, shard in enumerate(shards):
        run.heard(f"r{rank}", f"rank {rank} of {RANKS} step {step} shard {shard}", 9.0)
    return run


def killed_once() -> Run:
    run = job()
    run.killed("r0", 2.0)
    train(run, range(11, 31), ("r2", "r1"), now=2.5)
    run.heard("r0", "r0:99 is ready", 7.0)
    return run


def test_a_rank_is_killed_when_a_spare_stands_by() -> None:
    assert job().next_kill(EVERY, 1) == "r0"
    assert job(spare=False).next_kill(EVERY, 1) is None
    assert job().next_kill(EVERY + 1, 1) is None, "too early"
    assert job().next_kill(EVERY, 0) is None, "enough kills"


def test_the_next_kill_waits_until_the_place_is_taken_and_the_killed_member_stands_by() -> None:
    run = job()
    run.killed("r0", 2.0)
    assert run.next_kill(EVERY, 2) is None
    run.heard("r1", "rank 1 of 2 step 20 loss 0.1", 2.2)
    assert run.next_kill(EVERY, 2) is None, "rank 0 has no process yet"
    train(run, range(21, 31), ("r2", "r1"))
    assert run.next_kill(EVERY, 2) is None, "no spare stands by"
    run.heard("r0", "r0:99 is ready", 7.0)
    assert run.next_kill(EVERY, 2) == "r1", "ranks die in turns"
    assert not run.over(EVERY, 2)
    assert run.over(EVERY, 1)


def test_the_time_of_a_kill_ends_with_the_first_commit_in_another_process() -> None:
    run = job()
    run.killed("r0", 2.0)
    run.heard("r0", "rank 0 of 2 step 11 loss 0.1", 2.1)
    assert run.kills[0].seconds is None, "a line that the killed process had printed"
    run.heard("r2", "rank 0 of 2 step 12 loss 0.1", 2.5)
    assert (run.kills[0].place_taken_by, run.kills[0].seconds) == ("r2", 0.5)
    assert run.happenings[-1] == "r2 has committed step 12 as rank 0, 0.50 s after the kill"


def compared(killed: Run, undisturbed: Run) -> dict[str, Any]:
    return summary(undisturbed, killed, kills=1)


def test_equal_shards_after_all_kills_are_a_success() -> None:
    found = compared(end(killed_once(), 40, "a", "b"), end(job(), 40, "a", "b"))
    assert found["succeeded"]
    assert (found["steps"], found["kills_survived"], found["ranks_with_other_shards"]) == (40, 1, [])
    assert found["each_kill"] == [
        {"member": "r0", "rank": 0, "step": 10, "place_taken_by": "r2", "seconds_to_commit": 0.5}
    ]


def test_another_shard_another_end_a_missing_rank_or_another_number_of_ranks_is_a_failure() -> None:
    undisturbed = end(job(), 40, "a", "b")
    other = compared(end(killed_once(), 40, "a", "c"), undisturbed)
    assert (other["succeeded"], other["ranks_with_other_shards"]) == (False, [1])
    assert not compared(end(killed_once(), 41, "a", "b"), undisturbed)["succeeded"]
    assert not compared(end(killed_once(), 40, "a"), undisturbed)["succeeded"]
    assert not compared(end(job(), 40, "a", "b"), undisturbed)["succeeded"], "no rank was killed"
    assert not compared(Run(RANKS), Run(RANKS))["succeeded"]
    resized = end(killed_once(), 40, "a", "b")
    resized.heard("r1", "rank 0 of 1 step 35 loss 0.1", 8.0)
    assert not compared(resized, undisturbed)["succeeded"]
