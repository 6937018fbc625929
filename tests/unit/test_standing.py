"""Where a group stands after commits, failures, checkpoints and broken heals."""

from __future__ import annotations

from keepstep.standing import Standing


def test_a_commit_gives_the_state_the_lineage_of_its_quorum():
    standing = Standing("a:1", "a:1")
    standing.discard()
    standing.commit(7, participants=2, behind=False)
    assert standing.state_dict() == {"step": 1, "batches_committed": 2, "lineage": 7}
    assert standing.commit_failures == 0


def test_a_commit_of_a_group_that_took_part_behind_leaves_it_the_lineage_that_it_had():
    standing = Standing("a:1", "a:1")
    standing.commit(7, participants=2, behind=True)
    assert (standing.step, standing.lineage) == (1, "a:1")


def test_failures_are_counted_until_a_commit():
    standing = Standing("a:1", "a:1")
    standing.discard()
    standing.discard()
    assert (standing.step, standing.commit_failures) == (0, 2)


def test_a_checkpoint_without_a_lineage_is_of_no_known_lineage_unless_nothing_was_committed():
    trained, fresh = Standing("a:1", "a:1"), Standing("a:1", "a:1")
    trained.load({"step": 5, "batches_committed": 9})
    fresh.load({"step": 0, "batches_committed": 0})
    assert (trained.lineage, fresh.lineage) == ("", "a:1")


def test_a_torn_state_is_below_every_step_and_says_so():
    standing = Standing("a:1", "a:1")
    standing.load({"step": 5, "batches_committed": 9, "lineage": 3})
    standing.tear()
    assert standing.torn
    assert (standing.step, standing.lineage) == (0, "torn:a:1")
    assert "lineage" not in standing.state_dict()
    standing.load({"step": 6, "batches_committed": 12, "lineage": 4})
    assert not standing.torn
