"""Scripts whose optimizers take turns: which of them are out of turn."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, cycle, islice, repeat

import pytest

from keepstep.group.turns import LONGEST, NO_TURN, Turns, described, out_of_turn


def begun(*optimizers: str) -> str:
    turns = Turns()
    return [turns.begin(one) for one in optimizers][-1]


def test_a_group_that_begins_with_another_optimizer_is_out_of_turn() -> None:
    job, joiner = begun("d", "g"), begun("d")
    assert out_of_turn([job, job, joiner], [0, 1]) == [2]
    assert out_of_turn([joiner, job], [1]) == [0]
    assert out_of_turn([begun("d", "g", "d"), joiner], [0]) == []


def test_the_place_in_a_short_run_counts_once_the_job_has_ended_one() -> None:
    first, joiner = begun("d", "d"), begun("d")
    assert out_of_turn([first, joiner], [0]) == [], "no other optimizer has begun a step"
    job = begun("d", "d", "g", "d", "d")
    assert out_of_turn([job, joiner], [0]) == [1]
    assert out_of_turn([begun("d", "d"), joiner, job], [0, 2]) == [1], "a group of the cohort started later"


def test_the_place_in_a_long_run_does_not_count() -> None:
    first = ["d"] * (LONGEST + 1)
    assert out_of_turn([begun(*first, "g", "g"), begun("g")], [0]) == []
    assert out_of_turn([begun("g", *first), begun("d")], [0]) == []


def test_a_step_without_an_optimizer_fits_all() -> None:
    assert out_of_turn([NO_TURN, begun("d")], [0]) == []
    assert out_of_turn([begun("d"), NO_TURN], [0]) == []
    assert (described(NO_TURN), described(begun("d", "d"))) == ("start_quorum()", "the optimizer of d, 2 in a row")


@pytest.mark.parametrize("critics", [1, 2, 5])
@pytest.mark.parametrize("step", range(7, 14))
def test_a_group_that_leaves_steps_out_comes_to_the_turn_of_the_job_and_stays_there(critics: int, step: int) -> None:
    def loop() -> Iterator[str]:
        turns = Turns()
        return map(turns.begin, cycle([*repeat("d", critics), "g"]))

    job, joiner = loop(), loop()
    waits = next(islice(job, step, None))
    left_out = 0
    while out_of_turn([waits, turn := next(joiner)], [0]):
        left_out += 1
        assert left_out <= critics + 1, turn
    assert left_out == step % (critics + 1)
    assert not any(out_of_turn([one, other], [0, 1]) for one, other in islice(zip(job, joiner, strict=False), 30))


def test_groups_that_began_together_are_never_out_of_turn() -> None:
    a, b = Turns(), Turns()
    steps = chain(repeat("d", 40), islice(cycle("ddg"), 20), repeat("g", 50), islice(cycle("dg"), 10))
    assert all(not out_of_turn([a.begin(one), b.begin(one)], [0, 1]) for one in steps)
