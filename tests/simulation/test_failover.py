"""Some seeds of the simulation of lighthouses that stand by for each other. ``make simulate`` runs many more."""

from __future__ import annotations

import pytest

from tests.simulation.run import explain, violation


@pytest.mark.parametrize("first", range(0, 256, 16))
def test_nothing_that_must_hold_is_violated(first: int) -> None:
    for seed in range(first, first + 16):
        if violation(seed, lighthouses=2, careful=seed % 4 == 0) is not None:
            pytest.fail(explain(seed, lighthouses=2))
