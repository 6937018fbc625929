"""Requests of the core: answered, denied, cancelled, and rounds that cannot be completed any more."""

from __future__ import annotations

import pytest

from keepstep_lighthouse.quorum.events import Decision, Persist
from keepstep_mesh.protocol.messages import Denied, RoundBroken
from tests.support.models.core_driver import Driver, announced, announces, members, told


def test_a_request_resent_after_a_reconnect_gets_the_same_answer() -> None:
    driver = Driver(min_replicas=1)
    first = driver.start("a", "b")
    driver.closes("b")
    driver.opens("b")
    again = announced(driver.asks("b", request=1))
    assert again.to == ((driver.session_of["b"], 1),)
    assert (again.quorum_id, again.version, again.members) == (first.quorum_id, first.version, first.members)
    assert announced(driver.all_ask("ab", 1)).quorum_id == 1


def test_a_request_resent_for_an_outdated_answer_is_asked_again() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a", "b", "c")
    driver.closes("b")
    driver.fails("c")
    driver.opens("b")
    assert not announces(driver.asks("b", request=1)), "c is lost, no group can complete that round"
    assert announced(driver.asks("a", failures=1)).quorum_id == 2


def test_a_lower_request_is_ignored_and_a_higher_one_takes_the_place_of_an_open_one() -> None:
    driver = Driver(min_replicas=2)
    driver.open_all("a", "b")
    driver.asks("a", 3, request=5)
    assert driver.asks("a", 9, request=4) == []
    assert driver.asks("a", 4, request=6) == []
    announce = announced(driver.asks("b", 4))
    assert announce.to[0] == (driver.session_of["a"], 6)
    assert announce.members[0].step == 4


def test_a_client_that_was_restarted_under_its_old_id_may_count_from_one_again() -> None:
    driver = Driver(min_replicas=1)
    driver.opens("a")
    driver.asks("a", request=50)
    driver.opens("a")
    assert announces(driver.asks("a", request=1))


def test_a_denied_request_names_the_reason_and_asks_no_longer() -> None:
    driver = Driver(min_replicas=2)
    driver.open_all("a", "b")
    driver.asks("a", timeout=3)
    assert told(driver, driver.passes(2.9)) == {}
    assert told(driver, driver.passes(0.1)) == {
        "a": [Denied(1, "deadline", "1 of at least 2 groups have asked for a quorum")]
    }
    assert not announces(driver.asks("b"))
    assert announces(driver.asks("a"))


def test_deadlines_fire_in_their_own_order() -> None:
    driver = Driver(min_replicas=9)
    driver.open_all("a", "b", "c")
    for replica_id, timeout in (("a", 3.0), ("b", 1.0), ("c", 2.0)):
        driver.asks(replica_id, timeout=timeout)
    assert [list(told(driver, driver.passes(1))) for _ in range(3)] == [["b"], ["c"], ["a"]]


def broken_for(driver: Driver, decisions: list[Decision]) -> list[str]:
    """Return the groups that get ``RoundBroken``."""
    messages = told(driver, decisions)
    return [who for who, heard in messages.items() if any(isinstance(message, RoundBroken) for message in heard)]


def test_the_others_need_not_wait_for_a_member_that_gave_its_answered_request_up() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a", "b", "c")
    driver.asks("c", 1)
    assert broken_for(driver, driver.cancels("b")) == ["a"], "c asks already"
    assert driver.cancels("b") == [], "once is enough"


def test_the_others_need_not_wait_for_a_member_that_did_not_commit() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a", "b", "c")
    assert broken_for(driver, driver.asks("a", failures=1)) == ["b", "c"]
    assert broken_for(driver, driver.asks("b", failures=1)) == []


def test_the_others_need_not_wait_for_a_member_that_left_in_the_middle_of_a_step() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a", "b", "c")
    driver.asks("a", 1)
    assert broken_for(driver, driver.leaves("b") + driver.passes(4.99)) == []
    assert broken_for(driver, driver.passes(0.01)) == ["c"]


def test_a_member_that_stalls_at_the_last_step_completes_it_though_the_others_have_finished_and_left() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a", "b", "c")
    assert broken_for(driver, driver.leaves("a") + driver.leaves("b") + driver.passes(4.9, silent="c")) == []
    assert broken_for(driver, driver.leaves("c")) == []


def test_nobody_is_bothered_when_all_finish_the_step_that_a_group_left_after() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a", "b")
    decisions = driver.leaves("b") + driver.asks("a", 1) + driver.passes(1)
    assert members(announced(decisions)) == ["a"]
    assert broken_for(driver, decisions) == []


def test_members_that_the_job_went_on_without_need_not_wait_for_the_others() -> None:
    driver = Driver(min_replicas=1, join_timeout=10, heal_timeout=5)
    driver.start("a", "b", "c", "d", "e")
    driver.heals("d")
    driver.all_ask("abc", 1)
    assert broken_for(driver, driver.passes(10)) == ["d", "e"]


def test_a_cancelled_request_that_was_never_made_changes_nothing() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a", "b")
    assert driver.cancels("b", request=77) == []


def test_step_seconds_are_from_answer_to_next_request() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a")
    driver.passes(1.5)
    driver.asks("a", 1)
    assert driver.core.replicas(driver.now)[0].step_seconds == pytest.approx(1.5)
    assert driver.core.replicas(driver.now + 4)[0].last_commit_seconds_ago == pytest.approx(4)


def test_a_cancelled_request_is_in_no_quorum() -> None:
    driver = Driver(min_replicas=1)
    driver.open_all("a", "b", "c")
    driver.asks("a")
    driver.cancels("a")
    driver.asks("b")
    driver.asks("c")
    assert members(announced(driver.passes(60))) == ["b", "c"]


def test_a_request_whose_session_ended_is_in_no_quorum() -> None:
    driver = Driver(min_replicas=1)
    driver.open_all("a", "b", "c")
    driver.asks("a")
    driver.closes("a")
    driver.opens("a")
    driver.asks("b")
    driver.asks("c")
    assert members(announced(driver.passes(60))) == ["b", "c"]


def test_shrink_only_never_makes_a_quorum_that_is_too_small_or_empty() -> None:
    driver = Driver(min_replicas=2)
    driver.start("a", "b", "c")
    driver.leaves("b")
    driver.leaves("c")
    driver.open_all("d", "e")
    assert not announces(driver.asks("a", 1, shrink=True) + driver.asks("d", shrink=True) + driver.asks("e"))
    assert not announces(driver.passes(100)), "one member of the quorum is left, min_replicas is 2"
    driver.leaves("a")
    assert not announces(driver.passes(100)), "no member of the quorum is left"
    assert driver.core.reason(driver.now).numbers["candidates"] == 0


def test_a_lone_joiner_gets_no_quorum_below_min_replicas() -> None:
    driver = Driver(min_replicas=2)
    driver.start("a", "b")
    driver.leaves("a")
    driver.leaves("b")
    driver.opens("z")
    assert not announces(driver.asks("z", shrink=True))
    assert not announces(driver.asks("z") + driver.passes(100))


def test_the_relays_of_the_newest_durable_checkpoint_are_stored_before_the_answer() -> None:
    driver = Driver()
    driver.start("a")
    persist, *rest = driver.asks("a", 1, durable_relays=("r1", "r2"))
    assert isinstance(persist, Persist)
    assert persist.record.durable_relays == ("r1", "r2")
    assert announces(rest)
    assert not [one for one in driver.asks("a", 2, durable_relays=("r1", "r2")) if isinstance(one, Persist)]
    driver.asks("a", 3)
    assert driver.record.durable_relays == ("r1", "r2"), "an empty list changes nothing"


def test_requests_that_come_faster_than_rounds_do_not_pile_up() -> None:
    driver = Driver(min_replicas=2)
    driver.opens("a")
    for _ in range(1000):
        assert not announces(driver.asks("a"))  # the driver calls validate(), which bounds what is kept
