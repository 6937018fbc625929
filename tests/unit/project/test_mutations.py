"""The planted mistakes of ``make mutants`` still have their places in the source."""

from __future__ import annotations

import pytest

from tests.mutants import mutation as checks
from tests.mutants.mutation import Mutation, Trace
from tests.mutants.mutations import MUTATIONS
from tests.mutants.run import ROOT, found_once
from tests.simulation.traces import TRACES


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.name)
def test_a_mistake_can_be_made_in_one_place_and_no_other(mutation: Mutation) -> None:
    assert found_once(mutation), f"look for its new place in {mutation.file}"
    assert mutation.old != mutation.new


def test_every_check_of_a_mistake_is_there() -> None:
    assert {one.check.name for one in MUTATIONS if isinstance(one.check, Trace)} <= set(TRACES)
    for path, _, test in (one.check.id.partition("::") for one in MUTATIONS if isinstance(one.check, checks.Test)):
        assert f"def {test.partition('[')[0]}(" in (ROOT / path).read_text(), f"{path}::{test}"
    names = [one.name for one in MUTATIONS]
    assert len(names) == len(set(names))
