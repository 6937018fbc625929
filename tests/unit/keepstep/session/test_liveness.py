"""A lighthouse that falls silent is asked before it is given up; who slept does not blame it."""

from __future__ import annotations

from keepstep.session.liveness import Liveness


def liveness() -> Liveness:
    alive = Liveness(interval=0.1, timeout=4.0)
    alive.begins(10.0)
    return alive


def test_a_peer_that_was_heard_within_half_the_timeout_lives():
    assert liveness().judge(12.0, 10.1, stalled=False) == "lives"


def test_silence_is_asked_about_once_and_then_given_time():
    alive = liveness()
    assert [alive.judge(now, 10.0, stalled=False) for now in (12.0, 12.5, 13.9)] == ["ask", None, None]
    assert not alive.silent


def test_an_answer_in_time_ends_the_doubt_and_the_next_silence_is_asked_about_again():
    alive = liveness()
    alive.judge(12.0, 10.0, stalled=False)
    assert alive.judge(12.5, 12.1, stalled=False) == "lives"
    assert alive.judge(14.5, 12.1, stalled=False) == "ask"


def test_no_answer_for_the_other_half_is_silence():
    alive = liveness()
    alive.judge(12.0, 10.0, stalled=False)
    assert alive.judge(14.0, 10.0, stalled=False) == "silent"
    assert alive.silent
    alive.begins(15.0)
    assert not alive.silent


def test_a_worker_that_slept_asks_again_instead():
    alive = liveness()
    alive.judge(12.0, 10.0, stalled=False)
    assert alive.is_late(now=30.0, due=12.1)
    assert [alive.judge(now, 10.0, stalled=stalled) for now, stalled in ((30.0, True), (31.0, False))] == ["ask", None]
    assert not alive.is_late(now=31.1, due=31.0)


def test_a_heartbeat_is_due_an_interval_after_whatever_was_sent_last():
    alive = liveness()
    alive.sent(11.0)
    assert alive.beat_due == 11.1
