"""Where a group stands after commits, failures, checkpoints and broken heals."""

from __future__ import annotations

from typing import Any

import pytest

from keepstep.step.progress import GroupProgress


def at(step: int, lineage: int | str) -> GroupProgress:
    standing = GroupProgress("a:1", lineage)
    standing.step = step
    return standing


def restored(state: dict[str, Any], replica_id: str = "b:2") -> GroupProgress:
    standing = GroupProgress(replica_id, f"new:{replica_id}")
    standing.resume(state)
    return standing


def test_a_commit_gives_the_state_the_lineage_of_its_quorum():
    standing = GroupProgress("a:1", "new:a:1")
    standing.discard()
    standing.commit(7, participants=2, behind=False)
    assert standing.state_dict() == {"step": 1, "batches_committed": 2, "lineage": 7}
    assert standing.commit_failures == 0


def test_failures_are_counted_until_a_commit():
    standing = GroupProgress("a:1", "new:a:1")
    standing.discard()
    standing.discard()
    assert (standing.step, standing.commit_failures) == (0, 2)


def test_a_commit_of_a_group_that_took_part_behind_gives_it_a_lineage_that_nobody_else_has():
    first, other = at(5, 3), GroupProgress("b:1", 4)
    first.commit(7, participants=2, behind=True)
    other.commit(7, participants=2, behind=True)
    assert (first.step, first.lineage, other.lineage) == (6, "behind:a:1:1", "behind:b:1:1")
    first.commit(7, participants=2, behind=True)
    assert (first.step, first.lineage) == (7, "behind:a:1:1"), "the step tells its states apart"


def test_a_group_that_falls_behind_again_has_another_lineage_than_the_first_time():
    standing = at(5, 3)
    standing.commit(7, participants=2, behind=True)
    standing.lineage = 7  # it heals
    standing.commit(7, participants=2, behind=True)
    assert standing.lineage == "behind:a:1:2"


@pytest.mark.parametrize("lineage", ["diverged:a:1", "torn:a:1"])
def test_a_torn_or_diverged_state_stays_so_when_it_takes_part_behind(lineage):
    standing = at(5, lineage)
    standing.commit(7, participants=2, behind=True)
    assert standing.lineage == lineage


def test_a_commit_that_made_all_groups_equal_makes_their_facts_equal_too():
    ahead, behind = at(6, 7), at(2, "behind:b:1:1")
    ahead.batches_committed, behind.batches_committed = 12, 3
    for standing in (ahead, behind):
        standing.commit_synchronized(6, 7, batches_committed=12, quorum_id=8, participants=2)
        assert standing.state_dict() == {"step": 7, "batches_committed": 14, "lineage": "synchronized:8"}
    ahead.commit(8, participants=2, behind=False)
    assert ahead.lineage == 8


def test_a_group_that_marks_the_step_synchronized_differs_from_one_that_does_not():
    says, does_not = at(6, 7), at(6, 7)
    says.commit_synchronized(6, 7, batches_committed=0, quorum_id=7, participants=2)
    does_not.commit(7, participants=2, behind=False)
    assert says.step == does_not.step
    assert says.lineage != does_not.lineage


def test_a_checkpoint_is_told_from_a_live_state_until_a_commit_resumes_the_job():
    saved = {"step": 5, "batches_committed": 9, "lineage": 3}
    standing = restored(saved)
    assert standing.lineage == "loaded:3"
    assert standing.state_dict() == saved
    standing.commit(8, participants=1, behind=False)
    assert standing.lineage == "resumed:8:8"
    standing.commit(9, participants=1, behind=False)
    assert standing.lineage == "resumed:8:9"
    again = restored(standing.state_dict())
    assert again.lineage == "loaded:resumed:8:9"
    again.commit(12, participants=1, behind=False)
    assert again.lineage == "resumed:12:12"


def test_a_checkpoint_without_a_lineage_is_of_no_known_lineage_unless_nothing_was_committed():
    trained = restored({"step": 5, "batches_committed": 9})
    fresh = restored({"step": 0, "batches_committed": 0})
    assert (trained.lineage, fresh.lineage) == ("loaded:", "new:b:2")
    trained.commit(1, participants=1, behind=False)
    assert trained.lineage == "resumed:1:1"


@pytest.mark.parametrize("lineage", ["behind:a:1:1", "diverged:a:1", "torn:a:1"])
def test_a_torn_or_diverged_state_has_a_torn_or_diverged_checkpoint(lineage):
    """So two groups that load it are equal, and a group that loads another checkpoint of that step is not."""
    saved = at(5, lineage).state_dict()
    assert saved["lineage"] == lineage
    assert {restored(saved, one).lineage for one in ("b:1", "c:1")} == {f"loaded:{lineage}"}


def test_a_torn_state_is_below_every_step_and_says_so():
    standing = restored({"step": 5, "batches_committed": 9, "lineage": 3})
    standing.tear()
    assert standing.torn
    assert (standing.step, standing.lineage) == (0, "torn:b:2")
    assert restored(standing.state_dict()).torn
    standing.resume({"step": 6, "batches_committed": 12, "lineage": 4})
    assert not standing.torn
