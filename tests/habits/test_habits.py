"""Some of the scripts of ``make habits``: those that start soon, and differ most."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.habits import runs
from tests.habits.__main__ import check

FAST = (
    "anomaly_detection",
    "branches",
    "plateau_of_own_loss",
    "sparse_embedding",
    "tied_transformer",
    "gan_taking_turns",
)
MOST_LINES = 80


@pytest.mark.training
@pytest.mark.timeout(500)
@pytest.mark.parametrize("name", FAST)
def test_a_script_trains_with_keepstep_and_a_kill_as_with_ddp_or_is_refused(name: str, tmp_path: Path) -> None:
    """Two processes with DDP and two groups with keepstep, one of which starts again, take about five seconds."""
    _, faults = check(name, tmp_path)
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("name", runs.names())
def test_a_script_is_short_and_says_whose_habit_it_is(name: str) -> None:
    text = (runs.SCRIPTS / f"{name}.py").read_text()
    assert len(text.splitlines()) <= MOST_LINES
    assert ast.get_docstring(ast.parse(text))
    assert "import keepstep" not in text
    assert "from keepstep" not in text
