"""Requests, heals, and votes of the ranks of one group, merged, and errors for all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep.group.ranks.gathering import GatheredVotes
from keepstep.group.ranks.merging import CommitBarrier, DisagreeError, merge_asks
from keepstep.group.ranks.rank_link import denial, denied
from keepstep_mesh.errors import (
    Banned,
    CollectivesMismatch,
    KeepstepError,
    LayoutMismatch,
    SessionClosed,
    StartRefused,
)
from keepstep_mesh.protocol.group_messages import RankAsk, RankDecision, RankVote
from keepstep_mesh.protocol.membership import StateRoot


def ask(
    step: int = 3,
    lineage: int | str = 2,
    failures: int = 0,
    shrink: bool = False,
    timeout_ms: int = 60_000,
    layout: str = "",
    leaving: str = "",
) -> RankAsk:
    return RankAsk(1, step, lineage, shrink, failures, timeout_ms, leaving=leaving, layout=layout)


def merge(asks: dict[int, RankAsk], **told: bool) -> RankAsk:
    return merge_asks(asks, "a:1", **told)


def test_ranks_that_disagree_on_the_step_are_both_named():
    with pytest.raises(KeepstepError, match=r"rank 0 is at step 3 .* rank 1 at step 4"):
        merge({0: ask(step=3), 1: ask(step=4)})


def test_ranks_that_disagree_on_the_lineage_are_both_named():
    with pytest.raises(KeepstepError, match=r"rank 0 .*lineage 2.* rank 1 .*lineage 7"):
        merge({0: ask(lineage=2), 1: ask(lineage=7)})


def test_a_group_of_which_one_rank_is_torn_is_torn():
    for asks in ({0: ask(step=9), 1: ask(0, "torn:a:1")}, {0: ask(0, "torn:a:1"), 1: ask(0, "torn:a:1")}):
        assert (merge(asks).step, merge(asks).lineage) == (0, "torn:a:1")


def test_a_heal_that_reached_some_ranks_only_tears_the_group():
    asks = {0: ask(step=9, lineage=7), 1: ask(step=4, lineage=2)}
    assert (merge(asks, healed=True).step, merge(asks, healed=True).lineage) == (0, "torn:a:1")
    with pytest.raises(DisagreeError):
        merge(asks)


def test_a_heal_that_reached_all_ranks_or_none_does_not():
    assert merge({0: ask(step=9), 1: ask(step=9)}, healed=True).step == 9


def root_of(*roots: StateRoot | None) -> StateRoot | None:
    return merge({rank: replace(ask(), root=root) for rank, root in enumerate(roots)}).root


def test_the_root_of_a_group_is_that_of_its_rank_or_tells_each_of_its_ranks():
    one, other = StateRoot(3, 2, "aa"), StateRoot(3, 2, "bb")
    assert root_of(one) == one
    both = root_of(one, other)
    assert both is not None
    assert (both.step, both.lineage) == (3, 2)
    assert len({both, root_of(other, one), root_of(one, one), root_of(other, other)}) == 4
    assert root_of(one, other) == both


@pytest.mark.parametrize("other", [None, StateRoot(4, 2, "aa"), StateRoot(3, 1, "aa")])
def test_a_group_of_which_a_rank_has_no_root_of_that_state_has_none(other):
    assert root_of(StateRoot(3, 2, "aa"), other) is None
    assert root_of(other, StateRoot(3, 2, "aa")) is None


@pytest.mark.parametrize("last", [0, 1])
def test_commit_failures_are_the_largest_and_shrink_only_any_whoever_comes_last(last):
    asks = {last: ask(failures=0), 1 - last: ask(failures=2, shrink=True, timeout_ms=500)}
    merged = merge(asks)
    assert (merged.commit_failures, merged.shrink_only, merged.timeout_ms) == (2, True, 500)


def test_one_rank_that_leaves_takes_its_group_along():
    assert merge({0: ask(), 1: ask(leaving="SIGTERM")}).leaving == "SIGTERM"


def test_the_layout_of_a_group_tells_those_of_its_ranks_apart():
    assert merge({0: ask(), 1: ask()}).layout == ""
    one = merge({0: ask(layout="x"), 1: ask(layout="y")}).layout
    other = merge({0: ask(layout="y"), 1: ask(layout="x")}).layout
    assert one
    assert one != other


def vote(ok: bool, attempt: int = 1, quorum_id: int = 5, step: int = 3) -> RankVote:
    return RankVote(1, quorum_id, step, attempt, ok)


def test_a_step_commits_only_if_every_rank_votes_yes():
    barrier = CommitBarrier(2)
    assert barrier.vote(0, vote(True)) is None
    assert barrier.waiting_for() == [1]
    assert barrier.vote(1, vote(True)) == RankDecision(1, 5, 3, 1, ok=True)
    barrier.vote(1, vote(True, attempt=2))
    assert barrier.vote(0, vote(False, attempt=2)) == RankDecision(1, 5, 3, 2, ok=False)


def test_a_vote_that_timed_out_does_not_poison_the_next_step():
    barrier = CommitBarrier(2)
    barrier.vote(1, vote(False, attempt=1, step=3))
    assert barrier.vote(0, vote(True, attempt=2, step=4)) is None
    assert barrier.vote(1, vote(True, attempt=2, step=4)) == RankDecision(1, 5, 4, 2, ok=True)


def test_the_first_no_decides_and_later_votes_learn_it():
    barrier = CommitBarrier(3)
    no = RankDecision(1, 5, 3, 1, ok=False)
    assert barrier.vote(0, vote(True)) is None
    assert barrier.vote(2, vote(False)) == no
    assert barrier.vote(1, vote(True)) == no


def test_a_late_vote_for_an_older_attempt_is_dropped():
    barrier = CommitBarrier(2)
    barrier.vote(0, vote(True, attempt=2))
    assert barrier.vote(1, vote(False, attempt=1)) is None
    assert barrier.vote(1, vote(True, attempt=2)) == RankDecision(1, 5, 3, 2, ok=True)


def test_a_slow_rank_learns_the_no_after_the_others_have_polled():
    barrier = CommitBarrier(2)
    barrier.vote(0, vote(False))
    assert barrier.vote(0, RankVote(0, 0, 3, 1, True, 1)) is None
    assert barrier.vote(1, vote(True)) == RankDecision(1, 5, 3, 1, ok=False)
    assert barrier.vote(1, RankVote(0, 0, 3, 1, True, 1)) == RankDecision(0, 0, 3, 1, ok=True, poll=1)


def test_a_poll_that_the_ranks_passed_has_ended_with_no_and_a_later_one_needs_all_ranks():
    barrier = CommitBarrier(2)

    def poll(number: int, ready: bool) -> RankVote:
        return RankVote(0, 0, 3, 1, ready, number)

    assert barrier.vote(0, poll(1, False)) == RankDecision(0, 0, 3, 1, ok=False, poll=1)
    assert barrier.vote(0, poll(2, True)) is None, "rank 1 is an inner step behind"
    assert barrier.vote(1, poll(1, True)) == RankDecision(0, 0, 3, 1, ok=False, poll=1)
    assert barrier.vote(1, poll(2, True)) == RankDecision(0, 0, 3, 1, ok=True, poll=2)
    assert barrier.vote(1, vote(True, attempt=2)) is None
    assert barrier.vote(0, vote(True, attempt=2)) == RankDecision(1, 5, 3, 2, ok=True)


@pytest.mark.parametrize(
    "kind", [TimeoutError, LayoutMismatch, CollectivesMismatch, StartRefused, Banned, SessionClosed]
)
def test_every_rank_of_a_group_gets_the_kind_of_error_that_rank_0_got(kind):
    answer = denied(7, kind("the reason"))
    error = denial(answer)
    assert (type(error), str(error), answer.request) == (kind, "the reason", 7)


async def test_a_rank_does_not_wait_in_a_poll_that_another_rank_has_left_for_the_next_vote():
    votes = GatheredVotes(2)
    poll = votes.cast(0, RankVote(0, 0, 3, 1, True, 1))
    assert not poll.done()
    step = votes.cast(1, vote(True, attempt=2))
    assert poll.result() is False
    votes.cast(0, vote(True, attempt=2))
    assert step.result() is True
