"""Numbers in tables and events, for people."""

from __future__ import annotations

import click
import pytest

from keepstep_cli.asking.units import EventNumber, ago_text, event_text
from keepstep_mesh.text import seconds_text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.0, "0 ms"),
        (0.0131, "13 ms"),
        (1.5, "1.5 s"),
        (60, "60 s"),
        (119.9, "119.9 s"),
        (120, "2 min"),
        (200, "3 min 20 s"),
        (7199.7, "120 min"),
        (7500, "2 h 5 min"),
        (604_800, "7 d"),
        (180_000, "2 d 2 h"),
    ],
)
def test_times(seconds: float | None, text: str) -> None:
    assert seconds_text(seconds) == text


def test_a_time_ago() -> None:
    assert (ago_text(180.2), ago_text(None)) == ("3 min ago", "-")


def test_the_number_of_an_event_is_read_as_it_is_shown() -> None:
    number = (2 << 32) + 17
    assert event_text(number) == "2.17"
    convert = EventNumber().convert
    assert [convert(text, None, None) for text in ("2.17", str(number), "0")] == [number, number, 0]
    for text in ("2.", ".1", "-1", "1.2.3", "1.99999999999", "x", ""):
        with pytest.raises(click.BadParameter, match="expected the number of an event, such as"):
            convert(text, None, None)
