"""The core decides, word by word, as each scenario file says.

``KEEPSTEP_REWRITE_SCENARIOS=1`` writes the present decisions into the files. Review the changes
before you commit them.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.scenarios.dialogue import replay, scenario_files


@pytest.mark.parametrize("path", scenario_files(), ids=lambda path: path.stem)
def test_the_lighthouse_decides_as_the_scenario_says(path: Path) -> None:
    text = path.read_text()
    now = replay(text)
    if os.environ.get("KEEPSTEP_REWRITE_SCENARIOS"):
        path.write_text(now)
    else:
        assert now == text


def test_scenarios_are_numbered_without_gaps_and_once_each() -> None:
    assert [path.name[:3] for path in scenario_files()] == [f"{n:02}_" for n in range(1, len(scenario_files()) + 1)]
