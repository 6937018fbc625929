"""Histories of the simulator, which are the real core and the real plan under faults: every change is found."""

from __future__ import annotations

import json

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.simulation.checks.history import report_on
from tests.simulation.simulation import Simulation


def simulated(seed: int) -> dict[str, list[str]]:
    simulation = Simulation(seed, lighthouses=1)
    simulation.run()  # checks its own history
    return simulation.logs.lines


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.data())
def test_a_line_taken_out_of_a_history_is_missed(seed: int, data: st.DataObject) -> None:
    logs = simulated(seed)
    name = data.draw(st.sampled_from(sorted(name for name, lines in logs.items() if len(lines) > 2)))
    line = data.draw(st.integers(1, len(logs[name]) - 2))
    assume('"term"' not in logs[name][line + 1])  # the last before a kill may never have been written
    report = report_on({**logs, name: [*logs[name][:line], *logs[name][line + 1 :]]})
    assert "gap" in report.counts


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.data())
def test_a_commit_that_is_changed_is_found(seed: int, data: st.DataObject) -> None:
    logs = simulated(seed)
    commits = [(name, i) for name, lines in logs.items() for i, one in enumerate(lines) if '"committed"' in one]
    assume(commits)
    name, place = data.draw(st.sampled_from(commits))
    line = json.loads(logs[name][place])
    fact = data.draw(st.sampled_from(["step", "quorum_id", "epoch", "lineage", "n"]))
    value = data.draw(st.integers(0, 1000).filter(lambda value: value != line[fact]))
    changed = [*logs[name][:place], json.dumps({**line, fact: value}), *logs[name][place + 1 :]]
    assert not report_on({**logs, name: changed}).fine, (fact, value)
