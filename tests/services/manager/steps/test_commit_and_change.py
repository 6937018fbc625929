"""Signals and errors between the commit of a step and the end of the change of the weights.

Each group is a process of its own. ``on_step`` runs there, so the signals are sent from it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.services.manager.groups import events

pytestmark = pytest.mark.timeout(200)

SCRIPT = Path(__file__).with_name("interrupted_group.py")
FAULTY = 3
"""Step of the fault."""


def train(lighthouse: str, loop: str, fault: str) -> list[dict[str, Any]]:
    """Train two groups, of which a fault hits the first. Return what each of them prints."""
    groups = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), lighthouse, name, loop, what, str(FAULTY)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, what in (("a", fault), ("b", "nothing"))
    ]
    try:
        ended = [group.communicate(timeout=150) for group in groups]
    finally:
        for group in groups:
            group.kill()
            group.wait()
    for group, (_, errors) in zip(groups, ended, strict=True):
        assert group.returncode == 0, errors
    return [json.loads(output.splitlines()[-1]) for output, _ in ended]


@pytest.mark.parametrize("signal", ["SIGINT", "SIGUSR1"])
@pytest.mark.parametrize("loop", ["optimizer", "scaler", "committing", "LocalSGD", "DiLoCo", "decoupled"])
def test_a_signal_between_commit_and_change_is_handled_right_after_the_change(lighthouse, steps, loop, signal):
    a, b = train(lighthouse, loop, signal)
    exception = "KeyboardInterrupt" if signal == "SIGINT" else "InterruptedError"
    assert [(name, step) for name, step, _ in a["caught"]] == [(exception, FAULTY)]
    assert a["caught"][0][2] == b["digests"][str(FAULTY)], "the weights are those of the step"
    assert a["digests"].keys() & b["digests"].keys() >= set("3456"), "one may take its first step when it joins"
    assert all(a["digests"][step] == b["digests"][step] for step in "3456")
    assert "torn" not in events(steps)


def test_a_signal_after_a_bare_commit_makes_the_group_heal(lighthouse, steps):
    a, b = train(lighthouse, "should_commit", "SIGINT")
    assert [name for name, _, _ in a["caught"]] == ["KeyboardInterrupt"]
    assert a["digests"]["6"] == b["digests"]["6"]
    assert events(steps).count("torn") == 1


@pytest.mark.parametrize("loop", ["optimizer", "scaler", "committing", "should_commit", "DiLoCo", "decoupled"])
def test_an_error_of_an_optimizer_after_the_commit_makes_the_group_heal(lighthouse, steps, loop):
    a, b = train(lighthouse, loop, "error")
    assert [name for name, _, _ in a["caught"]] == ["RuntimeError"]
    assert a["digests"]["6"] == b["digests"]["6"]
    assert events(steps).count("torn") == 1
