"""Errors of a script that come again in every step."""

from __future__ import annotations

from keepstep.step.evidence.repeated_error import LIMIT, RepeatedError


def test_the_same_error_ends_the_group_when_no_other_step_lies_between() -> None:
    errors = RepeatedError()
    assert [errors.step_ended(ValueError("a")) for _ in range(LIMIT)] == [False] * (LIMIT - 1) + [True]


def test_steps_that_commit_or_fail_for_another_reason_do_not() -> None:
    for between in (None, ValueError("b"), TypeError("a")):
        errors = RepeatedError()
        for _ in range(3):
            for _ in range(LIMIT - 1):
                assert not errors.step_ended(ValueError("a"))
            assert not errors.step_ended(between)
    assert not any(RepeatedError().step_ended(None) for _ in range(2 * LIMIT))
