"""Each planted bug of ``make mutants`` fits the source, and its check exists."""

from __future__ import annotations

import pytest

from tests.mutants import mutation as checks
from tests.mutants.mutation import Mutation, Trace
from tests.mutants.mutations import MUTATIONS
from tests.mutants.run import ROOT, found_once
from tests.simulation.traces import TRACES


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda one: one.name)
def test_a_bug_fits_exactly_one_place(mutation: Mutation) -> None:
    assert found_once(mutation), f"its source line must occur exactly once in {mutation.file}"
    assert mutation.old != mutation.new


def test_every_check_exists() -> None:
    assert {one.check.name for one in MUTATIONS if isinstance(one.check, Trace)} <= set(TRACES)
    for path, _, test in (one.check.id.partition("::") for one in MUTATIONS if isinstance(one.check, checks.Test)):
        assert f"def {test.partition('[')[0]}(" in (ROOT / path).read_text(), f"{path}::{test}"
    names = [one.name for one in MUTATIONS]
    assert len(names) == len(set(names))
