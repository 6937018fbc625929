"""Some seeds of jobs with one copy. ``python -m tests.simulation.one_copy --seeds 100000`` runs many more."""

from __future__ import annotations

from collections import Counter

from keepstep.one_copy.core.recovery_plan import Kind
from tests.simulation.one_copy import Walk


def test_members_that_are_lost_at_random_moments_break_no_rule() -> None:
    kinds = Counter[Kind]()
    for seed in range(60):
        walk = Walk(seed)
        walk.run()
        kinds += walk.kinds
    assert set(kinds) == {Kind.FRESH, Kind.REPLACED, Kind.RESIZED, Kind.LOST}
