"""Offsets between the clocks of a sender and of the metrics service."""

from __future__ import annotations

import pytest

from keepstep_mesh.protocol.telemetry_records import (
    BatchHead,
    StateRecord,
    pack_batch,
    pack_record,
    read_batch,
)
from keepstep_mesh.telemetry.clock_offset import SAMPLES, ClockOffset
from keepstep_metrics.history.machine import MetricsCore


def exchange(clock: ClockOffset, now: float, ahead: float, there: float = 0.1, back: float = 0.1) -> None:
    """Note an exchange with a clock that is ``ahead``; the service takes 3 s to write."""
    clock.add(now, now + there + ahead, now + there + 3 + ahead, now + there + 3 + back)


def test_the_exchange_with_the_least_delay_decides() -> None:
    clock = ClockOffset()
    assert clock.seconds == 0.0
    exchange(clock, 100.0, ahead=7.0, there=2.0)
    assert clock.seconds == pytest.approx(7.95), "half of the difference of the two ways"
    exchange(clock, 200.0, ahead=7.0)
    exchange(clock, 300.0, ahead=7.0, back=1.0)
    assert clock.seconds == pytest.approx(7.0)


def test_old_exchanges_are_forgotten_and_a_clock_that_was_set_begins_again() -> None:
    clock = ClockOffset()
    exchange(clock, 100.0, ahead=7.0)
    for number in range(SAMPLES):
        exchange(clock, 200.0 + number, ahead=9.0, there=0.2, back=0.2)
    assert clock.seconds == pytest.approx(9.0)
    clock.add(400.0, 409.0, 412.0, 401.0)
    assert clock.seconds == 0.0, "the answer came before it was sent"


def test_the_merged_time_line_has_the_times_of_one_clock() -> None:
    core, now = MetricsCore(), 1000.0
    for name, offset in (("r0:1", 0.0), ("r1:1", 30.0)):
        head = BatchHead(source="worker", name=name, job="job", boot=name, first=1, clock_offset=offset)
        body = pack_batch(head, [pack_record(StateRecord(t=now - 10 - offset, state="training"))])
        core.apply(read_batch(body), now)
    begins = {name: group.timeline.since for name, group in core.jobs["job"].groups.items()}
    assert begins["r0"] == begins["r1"] == 990.0


def test_noise_moves_no_time() -> None:
    clock = ClockOffset()
    exchange(clock, 100.0, ahead=0.015)
    assert clock.seconds == 0.0
    exchange(clock, 200.0, ahead=7.0, there=0.05, back=0.05)
    exchange(clock, 300.0, ahead=7.01, there=0.01, back=0.01)
    assert clock.seconds == pytest.approx(7.0)
