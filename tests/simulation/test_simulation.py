"""Some seeds of the simulation, each with the core validated after every event. ``make simulate`` runs many more."""

from __future__ import annotations

import pytest

from tests.simulation.run import explain, violation


@pytest.mark.parametrize("first", range(0, 64, 8))
def test_nothing_that_must_hold_is_violated(first: int) -> None:
    for seed in range(first, first + 8):
        if violation(seed, careful=True) is not None:
            pytest.fail(explain(seed))
