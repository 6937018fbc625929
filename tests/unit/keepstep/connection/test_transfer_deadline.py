"""How long a transfer may take: all of it, or without progress."""

from __future__ import annotations

import pytest

from keepstep.connection import deadline
from keepstep.connection.deadline import Deadline
from keepstep.state.errors import TransferTimeout


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    one = Clock()
    monkeypatch.setattr(deadline, "time", one)
    return one


def test_without_a_limit_progress_gives_no_more_time(clock: Clock) -> None:
    deadline = Deadline(4.0, "step 1 was not received")
    clock.now += 3.0
    deadline.progressed()
    assert deadline.remaining() == 1.0
    clock.now += 1.0
    with pytest.raises(TransferTimeout, match=r"^step 1 was not received within 4\.0 s$"):
        deadline.remaining()


def test_with_a_limit_progress_restarts_the_time_up_to_the_limit(clock: Clock) -> None:
    deadline = Deadline(4.0, "step 1 was not received", 10.0)
    for _ in range(3):
        clock.now += 3.0
        deadline.progressed()
    assert deadline.remaining() == 1.0
    clock.now += 1.0
    with pytest.raises(TransferTimeout, match=r"^step 1 was not received within 10\.0 s$"):
        deadline.remaining()


def test_without_progress_it_ends_before_the_limit_and_says_why(clock: Clock) -> None:
    deadline = Deadline(4.0, "step 1 was not received", 10.0)
    clock.now += 4.0
    with pytest.raises(TransferTimeout, match=r"^step 1 was not received: no progress for 4\.0 s$"):
        deadline.remaining()
