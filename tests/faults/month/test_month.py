"""The simulated months of services, with few jobs: the driver works, and its limits hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.month.__main__ import MONTHS, play
from tests.faults.month.figures import Figures


@pytest.mark.parametrize("name", MONTHS)
def test_a_month_of_a_service_is_bounded(name: str, tmp_path: Path) -> None:
    figures = play(name, 31, tmp_path)
    assert figures.broken() == []
    assert len(figures.rows) == 30
    assert figures.rows[-1]["day"] == 29


def test_what_is_beyond_its_limit_or_grows_is_named() -> None:
    rows = [{"day": float(day), "keys": 10.0 * day, "python_blocks": 1000.0 + 100 * day} for day in range(10)]
    figures = Figures({"keys": 80}, rows=rows)
    assert figures.broken() == ["keys: 90 (limit 80)", "python_blocks grew 1.46 times after day 3"]
    assert "| keys | 0 | 30 | 60 | 90 | 90 | 80 |" in figures.table()
