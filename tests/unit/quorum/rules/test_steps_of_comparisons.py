"""Rounds in which the policy has the weights of all groups compared."""

from __future__ import annotations

import pytest

from keepstep_lighthouse.quorum.rules.verification import is_due


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
    assert [step for step in range(101) if is_due(step, every, allow_heal=True)] == due


def test_weights_are_compared_once_when_a_group_has_caught_up_unless_they_never_are() -> None:
    assert is_due(11, 1000, allow_heal=True, caught_up=True)
    assert not is_due(11, 0, allow_heal=True, caught_up=True)
    assert not is_due(11, 1000, allow_heal=False, caught_up=True)


def test_rounds_without_healing_are_not_compared() -> None:
    assert not is_due(1000, 1000, allow_heal=False)
