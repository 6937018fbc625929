"""Which readers of a snapshot have a turn."""

from __future__ import annotations

import pytest

from keepstep.transfer.direct.sending.admission import SLOW_JOINER_SECONDS, Admission


@pytest.fixture
def two() -> Admission:
    """Of four readers, a to d, which came in that order and each wait with one request, two have a turn at a time."""
    admission = Admission(at_once=2)
    for name in "abcd":
        admission.enter(name)
        admission.wait(name)
    return admission


def begun(admission: Admission, now: float = 0.0) -> str:
    """The readers one of whose requests may begin."""
    return "".join(name for name in "abcd" if admission.begin(name, now))


def test_the_first_that_came_have_a_turn_and_the_others_know_how_many_are_before_them(two: Admission) -> None:
    assert not two.begin("d", 0.0)
    assert not two.begin("c", 0.0)
    assert begun(two) == "ab"
    assert (two.ahead("c"), two.ahead("d")) == (0, 1)


def test_the_next_has_a_turn_when_one_ends(two: Admission) -> None:
    assert begun(two) == "ab"
    two.end("a")
    assert not two.begin("d", 0.0)
    assert two.begin("c", 0.0)


def test_an_earlier_reader_goes_first_again_with_its_next_request(two: Admission) -> None:
    assert begun(two) == "ab"
    two.end("a")
    two.wait("a")
    assert not two.begin("c", 0.0)
    assert two.begin("a", 0.0)


def test_all_requests_of_a_reader_share_its_turn(two: Admission) -> None:
    assert begun(two) == "ab"
    two.wait("a")
    assert two.begin("a", 0.0)
    two.end("a")
    assert not two.begin("c", 0.0), "a's other request is still being answered"


def test_a_reader_that_takes_nothing_keeps_its_turn_and_nobody_waits_for_it(two: Admission) -> None:
    assert begun(two) == "ab"
    two.record_progress("a", SLOW_JOINER_SECONDS - 0.1)
    assert not two.begin("c", SLOW_JOINER_SECONDS - 0.1)
    assert two.begin("c", SLOW_JOINER_SECONDS), "instead of b"
    assert not two.begin("d", SLOW_JOINER_SECONDS)
    two.end("b")
    assert not two.begin("d", SLOW_JOINER_SECONDS)


def test_no_reader_waits_for_one_that_gave_up_or_left(two: Admission) -> None:
    two.give_up("a")
    two.leave("b")
    assert "".join(name for name in "cd" if two.begin(name, 0.0)) == "cd"
    two.leave("c")
    two.end("c")
    two.record_progress("c", 0.0)
    two.give_up("c")
    two.wait("a")
    assert two.begin("a", 0.0)
