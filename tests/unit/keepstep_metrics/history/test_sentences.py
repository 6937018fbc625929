"""Sentences about events."""

from __future__ import annotations

import pytest

from keepstep_metrics.history.sentences import sentence


@pytest.mark.parametrize(
    ("size", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (4198, "4.1 KiB"), (5 << 20, "5.0 MiB"), (3 << 40, "3072.0 GiB")],
)
def test_a_heal_has_its_size_in_a_unit_that_fits(size, shown) -> None:
    told = sentence("healed", "r1", {"bytes": size, "seconds": 0.5, "via": "direct"})
    assert told == f"r1 healed: {shown} in 0.50 s, direct"
