"""Errors of a script that come again in every step."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable

from keepstep.step.evidence.repeated_error import LIMIT, OwnError, RepeatedError

numbers = itertools.count()


def raised(kind: type[Exception] = ValueError) -> OwnError:
    try:
        raise kind(f"number {next(numbers)}")
    except kind as error:
        return OwnError.reported(error, sys._getframe())


def reported() -> OwnError:
    return OwnError.reported(ValueError(f"number {next(numbers)}"), sys._getframe())


def reported_elsewhere() -> OwnError:
    return OwnError.reported(ValueError("number 0"), sys._getframe())


def test_errors_of_one_type_and_place_end_the_group_whatever_they_say() -> None:
    for fails in (raised, reported):
        errors = RepeatedError()
        assert [errors.step_ended(fails()) for _ in range(LIMIT)] == [False] * (LIMIT - 1) + [True]


def test_errors_that_another_thread_reports_are_compared_by_their_text() -> None:
    def reported_by_a_thread(text: str) -> OwnError:
        """As of a thread of torch, whose stack has no frame of a script."""
        return OwnError(ValueError(text), ())

    errors = RepeatedError()
    of_script = OwnError.reported(ValueError("not a number"), sys._getframe())
    told = [errors.step_ended(one) for one in (reported_by_a_thread("not a number"), of_script)]
    assert [*told, errors.step_ended(reported_by_a_thread("not a number"))] == [False, False, True]
    assert not errors.step_ended(reported_by_a_thread("another one"))


def test_steps_that_commit_or_fail_for_another_reason_do_not() -> None:
    others: list[Callable[[], OwnError | None]] = [
        lambda: None,
        reported,
        reported_elsewhere,
        lambda: raised(TypeError),
    ]
    for other in others:
        errors = RepeatedError()
        for _ in range(3):
            for _ in range(LIMIT - 1):
                assert not errors.step_ended(raised())
            assert not errors.step_ended(other())
    assert not any(RepeatedError().step_ended(None) for _ in range(2 * LIMIT))
