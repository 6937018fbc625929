"""Some seeds of the simulation. ``make simulate`` runs many more."""

from __future__ import annotations

import pytest

from tests.simulation.run import explain, violation


@pytest.mark.parametrize("first", range(0, 64, 8))
def test_no_rule_is_broken_with_one_lighthouse(first: int) -> None:
    for seed in range(first, first + 8):
        assert violation(seed, lighthouses=1, careful=True) is None, explain(seed, lighthouses=1)


@pytest.mark.parametrize("lighthouses", [2, 3])
@pytest.mark.parametrize("first", range(0, 128, 16))
def test_no_rule_is_broken_with_several_lighthouses(first: int, lighthouses: int) -> None:
    for seed in range(first, first + 16):
        found = violation(seed, lighthouses=lighthouses, careful=seed % 4 == 0)
        assert found is None, explain(seed, lighthouses=lighthouses)


@pytest.mark.parametrize("lighthouses", [1, 2])
def test_groups_finish_together_or_learn_that_the_others_did(lighthouses: int) -> None:
    for seed in range(30):
        found = violation(seed, lighthouses=lighthouses, careful=True, finishes=True)
        assert found is None, explain(seed, lighthouses=lighthouses, finishes=True)
