"""Each stored trace passes, with the network of several seeds."""

from __future__ import annotations

import pytest

from tests.simulation.traces import TRACES
from tests.simulation.training import Violation


@pytest.mark.parametrize("name", TRACES)
def test_a_trace_that_broke_a_draft_of_the_rules_passes(name: str) -> None:
    for seed in range(5):
        try:
            TRACES[name].play(seed)
        except Violation as violation:
            sim = TRACES[name].prepare(seed)
            sim.tracing = True
            with pytest.raises(Violation):
                sim.play(TRACES[name].script)
            pytest.fail(f"{name}, seed {seed}: {violation}\n" + "\n".join(sim.trace[-200:]))
