"""Rounds in which the policy has the weights of all groups compared."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from keepstep_lighthouse.quorum.verification.comparisons import STEPS_AFTER_CHANGE, STEPS_BETWEEN, Schedule


def compared(
    steps: Iterable[int],
    every: int = 1000,
    *,
    schedule: Schedule | None = None,
    changed: Callable[[int], bool] = lambda _: False,
    behind: Callable[[int], bool] = lambda _: False,
    allow_heal: bool = True,
) -> list[int]:
    """The steps of a job at which the groups compare their weights."""
    asked = schedule or Schedule()
    options = {"every": every, "allow_heal": allow_heal}
    return [s for s in steps if asked.is_due(s, same_members=not changed(s), all_equal=not behind(s), **options)]


@pytest.mark.parametrize(
    ("every", "due"),
    [
        (0, []),
        (1, list(range(1, 101))),
        (7, list(range(7, 101, 7))),
        (40, [10, 40, 80]),
        (1000, [10, 100]),
    ],
)
def test_comparisons_are_at_multiples_and_early_and_never_at_the_first_step(every: int, due: list[int]) -> None:
    assert compared(range(101), every) == due


def test_weights_are_compared_a_few_steps_after_the_members_changed() -> None:
    assert compared(range(20, 90), changed=lambda s: s in (31, 61)) == [
        31 + STEPS_AFTER_CHANGE,
        61 + STEPS_AFTER_CHANGE,
    ]
    assert compared(range(20, 90), changed=lambda s: s == 31, every=0) == []
    assert compared(range(20, 90), changed=lambda s: s == 31, allow_heal=False) == []


def test_weights_are_compared_when_no_member_is_behind_any_more() -> None:
    """A member that is behind for longer than the others train to the comparison catches up."""
    assert compared(range(20, 90), behind=lambda s: 31 <= s < 60) == [60]


def test_members_that_change_in_each_step_are_compared_every_few_steps() -> None:
    assert compared(range(1, 50), changed=lambda s: s > 0) == [4, 10, 14, 24, 34, 44]
    assert STEPS_BETWEEN == 10


def test_the_next_change_counts_again_after_the_job_went_back() -> None:
    schedule = Schedule()
    assert compared(range(500, 505), schedule=schedule, changed=lambda s: s == 500) == [503]
    assert compared(range(505, 506), schedule=schedule, changed=lambda _: True) == []
    assert compared(range(20, 30), schedule=schedule, changed=lambda s: s == 20) == [23]


def test_rounds_without_healing_are_not_compared() -> None:
    assert compared([1000], allow_heal=False) == []
