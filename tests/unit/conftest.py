"""Fixtures of the unit tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from keepstep.process_group import ProcessGroup, ProcessGroupGloo
from tests.support.jobs.cohort import Cohort


@pytest.fixture
def cohort() -> Iterator[Callable[..., Cohort]]:
    """Makes configured cohorts: ``cohort(3)``."""
    made = []

    def make(
        size: int,
        *,
        configured: bool = True,
        timeout: timedelta = timedelta(seconds=30),
        kind: Callable[[timedelta], ProcessGroup] = ProcessGroupGloo,
    ) -> Cohort:
        made.append(Cohort(size, timeout, kind))
        if configured:
            made[-1].configure()
        return made[-1]

    yield make
    for one in made:
        one.close()
