"""Fixtures of the unit tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest

from tests.support.jobs.cohort import Cohort


@pytest.fixture
def cohort() -> Iterator[Callable[..., Cohort]]:
    """Makes configured cohorts: ``cohort(3)``."""
    made = []

    def make(size: int, *, configured: bool = True, timeout: timedelta = timedelta(seconds=30)) -> Cohort:
        made.append(Cohort(size, timeout))
        if configured:
            made[-1].configure()
        return made[-1]

    yield make
    for one in made:
        one.close()
