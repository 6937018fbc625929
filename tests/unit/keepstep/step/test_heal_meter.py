"""How far a heal is and how fast, as it is reported and logged; time is an argument."""

from __future__ import annotations

import pytest

from keepstep.step.reporting.heal_meter import HealMeter, log_fields
from keepstep_mesh.telemetry.throughput import ThroughputMeter

MIB = 1 << 20


def test_a_rate_is_that_of_the_last_seconds() -> None:
    pace = ThroughputMeter(100.0)
    assert pace.rate(100.0) == 0
    pace.count(50, 101.0)
    assert pace.rate(102.0) == 25.0
    for second in range(2, 12):
        pace.count(50 + 10 * second, 100.0 + second)
    assert pace.rate(111.0) == 10.0


def test_a_rate_falls_to_nothing_when_nothing_moves() -> None:
    pace = ThroughputMeter(0.0)
    for tenth in range(1, 11):
        pace.count(100 * tenth, tenth / 10)
    assert pace.rate(1.0) == pytest.approx(1000.0)
    assert 0 < pace.rate(4.0) < 300
    assert pace.rate(7.0) == 0


def test_a_transfer_that_begins_again_is_measured_from_there() -> None:
    pace = ThroughputMeter(0.0)
    pace.count(1000, 1.0)
    pace.count(10, 2.0)
    pace.count(110, 3.0)
    assert pace.rate(3.0) == 100.0


def test_very_many_counts_take_little_room() -> None:
    pace = ThroughputMeter(0.0)
    for number in range(100_000):
        pace.count(number, number / 10_000)
    assert len(pace._counts) < 200
    assert pace.rate(10.0) == pytest.approx(10_000, rel=0.05)


def test_a_report_has_the_bytes_the_rate_and_where_they_come_from() -> None:
    meter = HealMeter(7, "a:1", 10.0)
    first = meter.report("direct", 10.25)
    assert (first.bytes_done, first.bytes_total, first.bytes_per_second, first.seconds_left) == (0, 0, 0.0, None)
    meter.moved(20 * MIB, 100 * MIB)
    told = meter.report("relay", 12.0)
    assert (told.step, told.source, told.via, told.seconds) == (7, "a:1", "relay", 2.0)
    assert (told.bytes_done, told.bytes_total, told.bytes_per_second) == (20 * MIB, 100 * MIB, 10.0 * MIB)
    assert told.seconds_left == 8.0
    assert not told.ended


def test_the_last_report_says_how_it_ended_and_the_rate_of_all_of_it() -> None:
    meter = HealMeter(7, "a:1", 0.0)
    meter.moved(100, 100)
    done = meter.last_report("direct", "", 10.0)
    assert (done.ended, done.error, done.bytes_per_second) == (True, "", 10.0)
    assert len(meter.last_report("direct", "x" * 5000, 10.0).error) == 1000


def test_a_long_heal_is_logged_when_it_began_and_every_few_seconds_and_a_short_one_is_not() -> None:
    meter = HealMeter(7, "a:1", 0.0)
    meter.moved(MIB, 4 * MIB)
    lines = {quarter / 4: meter.line(meter.report("direct", quarter / 4)) for quarter in range(1, 60)}
    assert {at: event for at, event in lines.items() if event} == {1.0: "heal began", 6.0: "healing", 11.0: "healing"}


def test_a_line_has_percent_rate_and_time_left() -> None:
    meter = HealMeter(7, "a:1", 0.0)
    assert log_fields(meter.report("", 1.0)) == {
        "step": 7,
        "source": "a:1",
        "via": "",
        "percent": None,
        "bytes_total": 0,
        "mib_per_second": 0.0,
        "seconds_left": None,
    }
    meter.moved(MIB, 4 * MIB)
    fields = log_fields(meter.report("direct", 2.0))
    assert (fields["percent"], fields["mib_per_second"], fields["seconds_left"]) == (25, 0.5, 6.0)
