"""The work of a Manager reports every error, and raises none."""

from __future__ import annotations

from keepstep.process_group.works import CompletedWork
from keepstep.step.reduction import ManagedWork


def test_a_callback_that_fails_is_reported_as_an_error_of_the_step() -> None:
    def no_memory() -> None:
        raise MemoryError

    errors: list[Exception] = []
    work = ManagedWork(CompletedWork([]), [], report=errors.append, ended=no_memory)
    assert not work.wait()
    assert "MemoryError" in str(errors)
