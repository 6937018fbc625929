"""The sum of the results of several soaks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from keepstep_chaos.observing.resources import Growth
from keepstep_chaos.recovery import Cost
from keepstep_chaos.verdict import Outcome
from keepstep_chaos.vocabulary import KINDS, Fault, Role, Target
from tests.faults.soak import total

GROUP, RELAY = Target(Role.GROUP, "r0"), Target(Role.RELAY, "10.0.0.1:29520")


def store(folder: Path, growth: dict[Target, Growth], *, checked: bool = True) -> None:
    """Store a run with two faults, and another one that could not be injected."""
    costs = [Cost(Fault(n, KINDS["kill"], target, 0.0), 0.0) for n, target in enumerate((GROUP, RELAY, RELAY))]
    costs[2].failed = "it does not run"
    found = Outcome(1, 600.0, costs, 40, growth).json()
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps({**found, "samples": 30, "soak_broken": []} if checked else found))


def grown(bytes_per_minute: float) -> Growth:
    return Growth(1, 400.0, 1 << 20, bytes_per_minute, 9, 0.0, 50.0)


def test_faults_of_all_runs_are_added_up_and_growth_is_that_of_all_processes_of_a_role(tmp_path):
    store(tmp_path / "a", {GROUP: grown(1 << 20), RELAY: grown(0.0)})
    store(tmp_path / "b", {Target(Role.GROUP, "r1"): grown(-(1 << 20)), RELAY: grown(0.0)})
    found = total.read(tmp_path)
    assert found.faults == 4
    assert found.by_kind() == {("kill", "group"): 2, ("kill", "relay"): 2}
    assert {role: one.processes for role, one in found.growth().items()} == {"group": 2, "relay": 2}
    assert found.growth()["group"].bytes_per_minute == pytest.approx(0)
    assert found.broken() == []
    assert total.lines(found)[-2:] == ["4 faults in 2 runs of 20 minutes, the longest of 10", "no promise was broken"]


def test_a_role_that_grows_and_a_run_without_its_last_check_are_broken(tmp_path):
    store(tmp_path / "a", {RELAY: grown(1 << 20)})
    store(tmp_path / "b", {RELAY: grown(1 << 20)}, checked=False)
    (unchecked, grows) = total.read(tmp_path).broken()
    assert unchecked == "b: the run ended before its last check"
    assert grows.startswith("processes of role relay grow: +1.00 MiB")
