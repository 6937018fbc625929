"""A timeline against the plainest model of one: a state for each tick."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep_metrics.history.timeseries.timeline import LIVING, State, Timeline, merged

TICKS = 40
CHANGES = st.lists(st.tuples(st.integers(0, TICKS - 1), st.integers(0, 12), st.sampled_from(State)), max_size=30)


def states(line: Timeline, until: int) -> list[State | None]:
    """By tick; None: not alive."""
    found: list[State | None] = [None] * until
    for begin, end, state in line.spans(0, until):
        for tick in range(int(begin), int(end)):
            found[tick] = state
    return found


@given(CHANGES)
def test_every_moment_since_the_first_mark_is_in_the_state_that_was_said_last_of_it(changes) -> None:
    line, model, last = Timeline(), [None] * TICKS, -1
    for begin, length, state in changes:
        end = min(begin + length, TICKS)
        if length == 0:
            line.mark(begin, state)
            if begin < last:
                continue
            end = TICKS
        else:
            line.fill(begin, end, state)
            if end > last:
                end = TICKS
            elif model[begin:end] and last > end and all(one is None for one in model[: end + 1]):
                end = next(tick for tick in range(TICKS) if model[tick] is not None)
        model[begin:end] = [state] * (end - begin)
        last = next((tick for tick in range(TICKS - 1, 0, -1) if model[tick] is not model[tick - 1]), 0)
    assert states(line, TICKS) == [None if one is State.GONE else one for one in model]
    starts, numbers = [*line.starts], [*line.states]
    assert starts == sorted(set(starts))
    assert all(one != other for one, other in pairwise(numbers))


def test_the_release_before_reads_a_wait_for_a_slow_group_as_a_wait_for_the_quorum() -> None:
    line = Timeline()
    line.mark(0, State.TRAINING)
    line.mark(1, State.WAITING_SLOW_GROUP)
    dumped = line.dump()
    assert Timeline.load(dumped).spans(0, 2) == line.spans(0, 2)
    before = [*line.spans(0, 1), (1, 2, State.WAITING_QUORUM)]
    assert Timeline.load(dumped[:2]).spans(0, 2) == before, "the two that the release before reads, and writes"


@given(CHANGES, st.integers(1, TICKS))
def test_the_seconds_of_the_states_are_the_life_and_a_picture_covers_the_same_time(changes, pixels) -> None:
    line = Timeline()
    for begin, length, state in changes:
        line.fill(begin, begin + length, state)
    spans = line.spans(0, TICKS)
    covered = sum(end - begin for begin, end, _ in spans)
    life = sum(end - begin for begin, end, state in spans if state is not State.STANDBY)
    seconds = line.seconds(0, TICKS)
    assert set(seconds) == set(LIVING)
    assert sum(seconds.values()) == pytest.approx(life)
    picture = merged(spans, TICKS / pixels)
    assert sum(end - begin for begin, end, _ in picture) == pytest.approx(covered)
    assert all(before[1] <= after[0] for before, after in pairwise(picture))
    ticks = {tick for begin, end, _ in spans for tick in range(int(begin), int(end))}
    assert ticks == {tick for begin, end, _ in picture for tick in range(int(begin), int(end))}


def test_a_picture_of_a_day_shows_a_retry_of_a_second() -> None:
    line = Timeline()
    line.mark(0, State.TRAINING)
    line.fill(1000, 1001, State.RETRYING)
    line.mark(1001.5, State.TRAINING)
    line.fill(1001.5, 1002, State.TRAINING)
    picture = merged(line.spans(0, 86400), 86400 / 500)
    assert [state for _, _, state in picture] == [State.TRAINING, State.RETRYING, State.TRAINING]


def test_the_distant_past_is_forgotten_and_the_rest_stays() -> None:
    line = Timeline()
    for tick in range(100):
        line.mark(tick, (State.TRAINING, State.RETRYING)[tick % 2])
    line.forget_before(50.5)
    assert line.spans(0, 52) == [(50, 51, State.TRAINING), (51, 52, State.RETRYING)]


def test_memory_of_a_group_that_changes_for_ever_is_bounded() -> None:
    line = Timeline()
    for tick in range(50_000):
        line.mark(tick, (State.TRAINING, State.RETRYING)[tick % 2])
    assert len(line.starts) <= 4500
