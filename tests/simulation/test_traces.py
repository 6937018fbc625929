"""Each stored trace passes, with the networks of several seeds."""

from __future__ import annotations

import pytest

from tests.simulation.checks.violation import Violation
from tests.simulation.traces import TRACES

SEEDS = 5
SHOWN_LINES = 200


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_that_broke_a_draft_of_the_rules_passes(name: str) -> None:
    for seed in range(SEEDS):
        try:
            TRACES[name].play(seed)
        except Violation as violation:
            sim = TRACES[name].prepare(seed)
            sim.tracing = True
            with pytest.raises(Violation):
                sim.play(TRACES[name].script)
            pytest.fail(f"{name}, seed {seed}: {violation}\n" + "\n".join(sim.trace[-SHOWN_LINES:]))
