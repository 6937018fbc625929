"""Sessions of the core: present groups, lost groups, and the messages about them."""

from __future__ import annotations

import pytest

from keepstep_lighthouse.quorum.events import (
    Asked,
    Cancelled,
    Closed,
    EndSession,
    Event,
    GroupFailed,
    HealProgress,
    Heard,
    LeftOnPurpose,
    MovedAway,
)
from keepstep_lighthouse.quorum.presence.departures import MAX_LOSSES_TOLD
from keepstep_lighthouse.quorum.presence.health import LATE_TICK_SECONDS
from keepstep_lighthouse.quorum.views.replicas import GONE_SECONDS, MAX_GONE, ReplicaState
from keepstep_mesh.protocol.membership import HeldAnswer
from keepstep_mesh.protocol.messages import Goodbye, Healing, MemberLost, QuorumRequest, Refused, RoundBroken
from tests.support.models.core_driver import BEAT_SECONDS, Driver, announced, announces, logged, members, states, told

HOLDS = HeldAnswer(1, 1, 0)


def test_leaving_is_no_loss() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a", "b")
    session = driver.session_of["b"]
    decisions = driver.leaves("b")
    assert told(driver, decisions) == {"b": [Goodbye()]}
    assert EndSession(session) in decisions
    assert logged(decisions) == [("left", "b")]
    assert driver.feed(Closed(session)) == []


def test_moving_to_another_lighthouse_is_no_loss() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a", "b")
    assert told(driver, driver.moves("b")) == {}


def test_survivors_of_a_kill_are_told_within_the_reconnect_grace_or_sooner() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a", "b", "c")
    driver.closes("b")
    assert told(driver, driver.passes(0.19)) == {}
    messages = told(driver, driver.passes(0.01))
    assert set(messages) == {"a", "c"}
    assert [type(message) for message in messages["a"]] == [MemberLost]
    assert announces(driver.all_ask("ac", failures=1))
    driver.closes("c")
    messages = told(driver, driver.asks("a", 1, failures=1))
    assert messages == {"a": [MemberLost(2, "c", "its connection ended and most of its quorum report it as lost")]}


def test_a_group_that_fails_is_lost_at_once() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a", "b")
    assert told(driver, driver.fails("b", "rank 1 exited with 9")) == {
        "a": [MemberLost(1, "b", "it failed: rank 1 exited with 9")]
    }


def test_a_lost_group_outside_the_quorum_is_nobodys_business() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a")
    driver.opens("b")
    assert told(driver, driver.fails("b")) == {}


def test_a_group_that_comes_back_in_time_was_never_away() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a", "b")
    driver.closes("b")
    assert states(driver)["b"] is ReplicaState.SUSPECT
    driver.passes(0.19)
    assert told(driver, driver.opens("b", held=HOLDS)) == {}
    assert told(driver, driver.passes(1)) == {}
    assert announced(driver.all_ask("ab", 1)).quorum_id == 1


def test_a_new_session_of_the_same_incarnation_replaces_the_old_one() -> None:
    driver = Driver(min_replicas=1)
    driver.open_all("a", "b")
    driver.asks("a")
    old = driver.session_of["a"]
    decisions = driver.opens("a")
    assert EndSession(old) in decisions
    assert [type(m) for m in told(driver, decisions)["a"]] == [Refused]
    assert not announces(driver.asks("b")), "the request of the old session is gone"
    assert announced(driver.asks("a")).to[0][0] == driver.session_of["a"]


def test_a_silent_group_is_lost_after_the_heartbeat_timeout_and_any_frame_is_a_heartbeat() -> None:
    driver = Driver(min_replicas=1, heartbeat_timeout=5)
    driver.start("a", "b", "c")
    driver.passes(4, silent="b")
    driver.heals("b")
    driver.passes(4.9, silent="b")
    assert "b" in driver.session_of
    messages = told(driver, driver.passes(0.1, silent="b"))
    assert set(messages) == {"a", "c"}
    assert "b" not in driver.session_of


def test_a_member_that_reconnects_hears_what_it_missed() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a", "b", "c")
    driver.closes("a")
    driver.fails("c", "x")
    assert told(driver, driver.opens("a", held=HOLDS)) == {"a": [MemberLost(1, "c", "it failed: x")]}


def test_a_group_that_was_lost_and_returns_hears_that_its_quorum_gave_it_up() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a", "b")
    driver.closes("b")
    driver.passes(0.2)
    (message,) = told(driver, driver.opens("b", held=HOLDS))["b"]
    assert isinstance(message, MemberLost)
    assert message.replica_id == "b"


def test_an_answer_of_an_older_quorum_is_called_back() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a", "b")
    driver.closes("b")
    driver.passes(0.2)
    driver.asks("a", failures=1)
    assert told(driver, driver.opens("b", held=HOLDS)) == {
        "b": [RoundBroken(1, "quorum 1 is over, the job is at 2")],
    }


def test_members_are_not_flooded_when_most_of_the_job_dies_at_once() -> None:
    driver = Driver(min_replicas=1)
    everybody = [f"r{number:02}" for number in range(40)]
    driver.start(*everybody)
    for replica_id in everybody[1:]:
        driver.closes(replica_id)
    messages = told(driver, driver.passes(0.2))
    assert len(messages["r00"]) == MAX_LOSSES_TOLD
    assert len(announced(driver.asks("r00", failures=1)).members) == 1


def test_a_thousand_groups_that_die_at_once_are_no_burden() -> None:
    driver = Driver(min_replicas=1)
    driver.validates = False
    everybody = [f"r{number:04}" for number in range(1200)]
    driver.start(*everybody)
    for replica_id in everybody[1:]:
        driver.closes(replica_id)
    driver.passes(0.2)
    driver.core.validate()
    assert members(announced(driver.asks("r0000", failures=1))) == ["r0000"]


def test_a_minority_that_reports_its_quorum_broken_does_not_end_the_grace() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a", "b", "c", "d", "e")
    driver.closes("e")
    driver.asks("a", failures=1)
    assert told(driver, driver.asks("b", failures=1)) == {}, "two of four others"
    assert set(told(driver, driver.asks("c", failures=1))) == {"a", "b", "c", "d"}


def test_a_report_and_a_departure_together_are_most_of_the_quorum() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a", "b", "c")
    driver.closes("c")
    driver.asks("a", failures=1)
    assert members(announced(driver.leaves("b"))) == ["a"]


def test_a_lighthouse_that_slept_gives_everybody_time_to_be_heard() -> None:
    driver = Driver(min_replicas=1, heartbeat_timeout=5)
    driver.start("a", "b")
    driver.now += 60
    assert told(driver, driver.tick()) == {}, "their heartbeats wait in the sockets"
    driver.beats("a")
    messages = told(driver, driver.passes(LATE_TICK_SECONDS, silent="b"))
    assert list(messages) == ["a"]
    assert list(driver.session_of) == ["a"]


def test_a_tick_at_any_time_is_harmless() -> None:
    driver = Driver(min_replicas=1)
    assert driver.tick() == []
    driver.start("a", "b")
    assert driver.tick() == []
    driver.asks("a", 1)
    driver.passes(BEAT_SECONDS / 2)
    assert driver.tick() == []


def test_the_dead_are_forgotten() -> None:
    driver = Driver(min_replicas=1)
    driver.opens("stays")
    for number in range(3 * MAX_GONE):
        driver.opens(f"r{number}:x")
        driver.asks(f"r{number}:x")
        driver.heals(f"r{number}:x")
        driver.closes(f"r{number}:x")
        driver.passes(0.2)
    views = driver.core.replicas(driver.now)
    assert [view.replica_id for view in views if view.state is not ReplicaState.GONE] == ["stays"]
    assert len(views) == 1 + MAX_GONE
    driver.passes(GONE_SECONDS + 1)
    assert [view.replica_id for view in driver.core.replicas(driver.now)] == ["stays"]


def test_each_incarnation_is_shown_once_those_that_went_last_first_and_as_old_as_they_are() -> None:
    driver = Driver(min_replicas=1)
    for replica_id in ("r0:1", "r1:1", "r0:2", "r1:1"):
        driver.opens(replica_id)
        driver.closes(replica_id)
        driver.passes(1.0)
    driver.opens("r1:1")
    views = driver.core.replicas(driver.now)
    assert [(view.replica_id, view.state) for view in views] == [
        ("r1:1", ReplicaState.IDLE),
        ("r0:2", ReplicaState.GONE),
        ("r0:1", ReplicaState.GONE),
    ]
    assert [view.heard_seconds_ago for view in views] == pytest.approx([0.0, 2.0, 4.0])


@pytest.mark.parametrize(
    "event",
    [
        Asked(99, QuorumRequest(1, 0, "", False, 0, 1000)),
        Closed(99),
        Heard(99),
        Cancelled(99, 1),
        HealProgress(99, Healing(1, 2, 3.0)),
        LeftOnPurpose(99, ""),
        MovedAway(99),
        GroupFailed(99, ""),
    ],
    ids=lambda event: type(event).__name__,
)
def test_an_event_of_an_unknown_session_is_ignored(event: Event) -> None:
    driver = Driver(min_replicas=1)
    driver.start("a")
    assert driver.feed(event) == []
