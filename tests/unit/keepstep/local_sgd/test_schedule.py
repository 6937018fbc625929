"""When outer steps begin and end, and which fragments they take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.local_sgd.schedule import Schedule


@st.composite
def settings(draw: st.DrawFn) -> tuple[int, int, int]:
    """``sync_every``, number of fragments, delay."""
    fragments, period = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    return fragments * period, fragments, draw(st.integers(0, period - 1))


@given(settings(), st.lists(st.booleans(), max_size=30))
def test_outer_steps_have_one_period_each_and_take_the_fragments_in_turn(values, votes) -> None:
    sync_every, fragments, delay = values
    schedule, committed, done, began = Schedule(*values), 0, [], None
    for step in range(1, len(votes) * sync_every // fragments + 1):
        schedule.count()
        if schedule.begins:
            assert not schedule.ends
            began = (step, schedule.begin(committed))
        if schedule.ends:
            assert schedule.in_flight is not None
            done.append((*began, step, committed))
            committed += votes[len(done) - 1]
            schedule.end()
    assert len(done) == len(votes)
    for number, (began_at, fragment, ended_at, steps_before) in enumerate(done):
        assert ended_at == (number + 1) * schedule.period
        assert began_at == ended_at - delay
        assert fragment == steps_before % fragments
    for (_, fragment, _, _), (_, following, _, _), vote in zip(done, done[1:], votes, strict=False):
        assert following == ((fragment + 1) % fragments if vote else fragment), "a step that failed is tried again"


@given(settings(), st.integers(0, 60))
def test_a_group_that_heals_begins_and_ends_with_the_group_that_it_healed_from(values, position) -> None:
    joiner, source = Schedule(*values), Schedule(*values)
    source.position = joiner.position = position
    for _ in range(3 * source.period):
        for one in (joiner, source):
            one.count()
            if one.begins:
                one.begin(0)
        assert (joiner.position, joiner.in_flight, joiner.ends) == (source.position, source.in_flight, source.ends)
        if source.ends:
            joiner.end()
            source.end()


def test_a_group_that_comes_late_begins_at_once() -> None:
    schedule = Schedule(12, 2, 2)
    schedule.skip_to_begin()
    assert (schedule.position, schedule.begins) == (4, True)
    schedule.position = 5
    schedule.skip_to_begin()
    assert schedule.position == 5


def test_an_outer_step_that_is_abandoned_begins_again() -> None:
    schedule = Schedule(4, 1, 1)
    for _ in range(3):
        schedule.count()
    schedule.begin(0)
    schedule.abandon()
    assert schedule.begins
    assert not schedule.ends


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ((0,), "sync_every=0 must be at least 1"),
        ((10, 0), "model_fragments is empty"),
        ((10, 3), "sync_every=10 must be a multiple of the 3 fragments"),
        ((2, 3), "sync_every=2 must be a multiple of the 3 fragments"),
        ((10, 2, 5), r"fragment_sync_delay=5 must be in \[0, 5\)"),
        ((10, 2, -1), r"fragment_sync_delay=-1 must be in \[0, 5\)"),
    ],
)
def test_a_value_out_of_range_is_named(values, reason) -> None:
    with pytest.raises(ValueError, match=reason):
        Schedule(*values)
