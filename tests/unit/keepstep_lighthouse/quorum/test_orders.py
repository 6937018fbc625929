"""Orders of administrators: their effects, their writes before an announcement, and a restarted lighthouse."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from keepstep_lighthouse.quorum.events import Announce, Decision, EndSession, Persist, Tell
from keepstep_lighthouse.quorum.forming.membership import HIGHEST_QUORUM_ID_SEEN
from keepstep_lighthouse.quorum.job_record import Ban, JobRecord
from keepstep_lighthouse.quorum.presence.bans import MAX_EVICTED
from keepstep_lighthouse.quorum.views.replicas import ReplicaState
from keepstep_mesh.protocol.membership import HeldAnswer
from keepstep_mesh.protocol.messages import Drain, Evicted, MemberLost, Refused, RoundBroken
from keepstep_mesh.protocol.policy import Policy
from tests.support.models.core_driver import Driver, announced, announces, logged, members, states, told


def kinds(decisions: Sequence[Decision]) -> list[type[Decision]]:
    return [type(decision) for decision in decisions]


# ---- rule 2: written before it is announced or acknowledged


def test_a_new_quorum_is_written_before_it_is_announced() -> None:
    driver = Driver(min_replicas=1)
    driver.opens("a")
    decisions = driver.asks("a")
    assert kinds(decisions)[:2] == [Persist, Announce]
    decisions = driver.asks("a", failures=1)
    assert kinds(decisions)[:2] == [Persist, Announce], "a quorum_id raised for a failed commit too"


def test_an_eviction_is_written_before_anybody_hears_of_it() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a", "b")
    decisions = driver.evicts("b", ban_seconds=5)
    assert kinds(decisions)[0] is Persist
    assert driver.record.evicted == ("b",)
    assert [ban.target for ban in driver.record.bans] == ["b"]


def test_a_higher_quorum_id_is_written_before_the_session_is_used() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a")
    decisions = driver.opens("b", seen=30)
    assert kinds(decisions)[0] is Persist
    assert driver.record.quorum_id == 30


def test_the_highest_quorum_id_that_a_hello_may_report_does_not_refuse_the_groups_that_come_after_it() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a", "b")
    driver.opens("c", seen=HIGHEST_QUORUM_ID_SEEN)
    for number in (1, 2):
        announce = announced(driver.all_ask("abc", number, number, failures=1))
        assert announce.quorum_id == HIGHEST_QUORUM_ID_SEEN + number
        driver.restart()
        for name in "abc":
            assert not any(
                isinstance(one, Refused) for one in told(driver, driver.opens(name, seen=announce.quorum_id))
            )
        driver.passes(6.0)
    assert driver.record.quorum_id < 2**53


@pytest.mark.parametrize("seen", [2**52 + 1, 2**53, 2**62])
def test_an_absurd_quorum_id_is_refused(seen: int) -> None:
    driver = Driver(min_replicas=1)
    decisions = driver.opens("a", seen=seen)
    (message,) = told(driver, decisions)["a"]
    assert isinstance(message, Refused)
    assert message.code == "bad_message"
    assert driver.record.quorum_id == 0


# ---- eviction, bans, drains


def test_an_evicted_incarnation_is_told_and_stays_out_over_restarts_while_its_name_may_return() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a:1", "b:1")
    session = driver.session_of["b:1"]
    decisions = driver.evicts("b")
    assert told(driver, decisions) == {
        "b:1": [Evicted("bad disk", 0)],
        "a:1": [MemberLost(1, "b:1", "evicted by ann: bad disk")],
    }
    assert EndSession(session) in decisions
    driver.restart()
    driver.opens("a:1")
    (message,) = told(driver, driver.opens("b:1"))["b:1"]
    assert isinstance(message, Refused)
    assert message.code == "banned"
    assert told(driver, driver.opens("b:2")) == {}


def test_a_banned_name_stays_out_until_the_ban_is_over() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a:1")
    driver.evicts("b", ban_seconds=60)
    driver.restart()
    driver.opens("b:1")
    assert "b:1" not in driver.session_of
    driver.passes(59)
    driver.opens("b:1")
    assert "b:1" not in driver.session_of
    driver.passes(1)
    driver.opens("b:1")
    assert "b:1" in driver.session_of


def test_evicting_one_incarnation_leaves_its_namesake() -> None:
    driver = Driver(min_replicas=1)
    driver.open_all("a:1", "a:2")
    driver.evicts("a:1")
    assert list(driver.session_of) == ["a:2"]
    assert members(announced(driver.asks("a:2"))) == ["a:2"]


def test_evicting_whom_nobody_knows_changes_nothing_but_an_incarnation_can_be_named_before_it_comes() -> None:
    driver = Driver(min_replicas=1)
    assert driver.evicts("nobody") == []
    assert kinds(driver.evicts("nobody:1"))[0] is Persist
    driver.opens("nobody:1")
    assert driver.session_of == {}


def test_readmitting_lifts_evictions_and_bans_of_a_name_and_of_its_incarnations() -> None:
    driver = Driver(min_replicas=1)
    driver.open_all("a:1")
    driver.evicts("a:1", ban_seconds=60)
    driver.evicts("a", ban_seconds=60)
    assert len(driver.record.bans) == 2
    decisions = driver.readmits("a")
    assert logged(decisions) == [("readmitted", "a")]
    assert (driver.record.bans, driver.record.evicted) == ((), ())
    assert driver.readmits("a") == []
    driver.opens("a:1")
    assert list(driver.session_of) == ["a:1"]


def test_evictions_and_bans_do_not_pile_up() -> None:
    driver = Driver(min_replicas=1)
    for number in range(MAX_EVICTED + 5):
        driver.evicts(f"r{number}:x", ban_seconds=0.5)
        driver.passes(1)
    assert len(driver.record.evicted) == MAX_EVICTED
    assert len(driver.record.bans) == 1, "those that are over are forgotten"


def test_bans_that_are_over_are_not_taken_from_the_store() -> None:
    driver = Driver(record=JobRecord(bans=(Ban("a", 10.0, ""), Ban("b", 2_000_000.0, ""))))
    assert [ban.target for ban in driver.core.record.bans] == ["b"]


def test_a_drained_group_is_told_each_time_that_it_connects_and_is_a_member_until_it_leaves() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a:1", "b:1")
    assert told(driver, driver.drains("b")) == {"b:1": [Drain("maintenance")]}
    driver.closes("b:1")
    assert told(driver, driver.opens("b:1")) == {"b:1": [Drain("maintenance")]}
    driver.asks("a:1", 1)
    assert members(announced(driver.asks("b:1", 1))) == ["a:1", "b:1"]
    driver.asks("a:1", 2)
    assert members(announced(driver.leaves("b:1"))) == ["a:1"]
    assert driver.drains("b") == []


def test_a_suspect_that_is_drained_hears_of_it_when_it_is_back() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a", "b")
    driver.closes("b")
    assert told(driver, driver.drains("b")) == {}
    assert told(driver, driver.opens("b")) == {"b": [Drain("maintenance")]}


# ---- takeover


def taken_over(*replica_ids: str, policy: Policy | None = None) -> Driver:
    """A lighthouse that found a quorum of these in its store."""
    driver = Driver(policy=policy or Policy(heartbeat_timeout=5))
    driver.start(*replica_ids)
    driver.restart()
    return driver


def test_nothing_is_formed_before_all_members_are_back() -> None:
    driver = taken_over("a", "b", "c")
    driver.open_all("a", "b", "z")
    assert not announces(driver.all_ask("abz", 1))
    assert driver.core.reason(driver.now).code == "takeover_grace"
    assert states(driver)["c"] is ReplicaState.ABSENT
    driver.opens("c")
    announce = announced(driver.asks("c", 1))
    assert (members(announce), announce.version) == (["a", "b", "c", "z"], 1)


def test_a_confirmed_quorum_keeps_its_id_over_a_restart_and_is_not_written() -> None:
    driver = taken_over("a", "b")
    driver.open_all("a", "b")
    decisions = driver.all_ask("ab", 1)
    assert announced(decisions).quorum_id == 1
    assert Persist not in kinds(decisions)


def test_absent_members_are_lost_when_the_grace_is_over_and_not_before() -> None:
    driver = taken_over("a", "b", "c", policy=Policy(heartbeat_timeout=5, takeover_grace=3))
    driver.open_all("a", "b")
    driver.asks("a", failures=1)
    driver.asks("b", failures=1)
    decisions = driver.passes(2.9)
    assert decisions == []
    decisions = driver.passes(0.1)
    assert {who: [type(m) for m in messages] for who, messages in told(driver, decisions).items()} == {
        "a": [MemberLost],
        "b": [MemberLost],
    }
    assert members(announced(decisions)) == ["a", "b"]


def test_stragglers_have_join_timeout_from_the_end_of_the_grace_so_that_strangers_do_not_take_the_job_over() -> None:
    driver = taken_over("a", "b", "c", policy=Policy(1, join_timeout=4, heartbeat_timeout=5))
    driver.opens("a", held=HeldAnswer(1, 1, 7))
    driver.opens("b", held=HeldAnswer(1, 1, 7))
    driver.open_all("x", "y", "z")
    driver.all_ask("xyz")
    decisions = driver.passes(5)
    assert set(told(driver, decisions)) == {"a", "b"}, "c is lost"
    assert not announces(decisions), "a and b have heard of it just now"
    driver.asks("a", 7, 1, failures=1)
    assert members(announced(driver.asks("b", 7, 1, failures=1))) == ["a", "b", "x", "y", "z"]


def test_nobody_is_judged_in_the_takeover_grace_but_after_it() -> None:
    driver = taken_over("a", "b", "c")
    driver.open_all("a", "b")
    driver.closes("b")
    driver.asks("a", failures=1)
    assert told(driver, driver.passes(4.9)) == {}
    messages = told(driver, driver.passes(0.1))["a"]
    assert [m.replica_id for m in messages if isinstance(m, MemberLost)] == ["c", "b"]


def test_leaving_and_failing_are_no_judgement() -> None:
    driver = taken_over("a", "b", "c")
    driver.open_all("a", "b")
    assert set(told(driver, driver.fails("b"))) == {"a"}


def test_an_absent_member_can_be_evicted_and_is_not_waited_for_then() -> None:
    driver = taken_over("a:1", "b:1")
    driver.opens("a:1")
    driver.asks("a:1", 1)
    assert members(announced(driver.evicts("b"))) == ["a:1"]
    assert driver.record.evicted == ("b:1",)


def test_a_round_that_only_some_members_heard_of_is_broken_whoever_comes_first() -> None:
    for asker_first in (True, False):
        driver = taken_over("a", "b", "c")
        if asker_first:
            driver.opens("b")
            driver.asks("b", 5)
            messages = told(driver, driver.opens("a", held=HeldAnswer(1, 1, 5)))
        else:
            driver.opens("a", held=HeldAnswer(1, 1, 5))
            driver.opens("b")
            messages = told(driver, driver.asks("b", 5))
        assert list(messages) == ["a"]
        assert isinstance(messages["a"][0], RoundBroken)
        driver.opens("c", held=HeldAnswer(1, 1, 5))
        driver.asks("c", 5, failures=1)
        assert announced(driver.asks("a", 5, failures=1)).quorum_id == 2


def test_a_member_that_leaves_instead_of_asking_again_breaks_the_round_that_it_did_not_hear_of() -> None:
    driver = taken_over("a", "b", "c")
    held = HeldAnswer(1, 1, 5)
    driver.opens("a", held=held)
    driver.opens("b")
    driver.opens("c", held=held)
    messages = told(driver, driver.leaves("b") + driver.passes(5))
    assert [type(messages[one][0]) for one in "ac"] == [RoundBroken, RoundBroken]
    driver.closes("a")
    (message,) = told(driver, driver.opens("a", held=held))["a"]
    assert isinstance(message, RoundBroken), "it may have missed it"


def test_a_round_that_all_heard_of_goes_on() -> None:
    driver = taken_over("a", "b")
    held = HeldAnswer(1, 1, 5)
    assert told(driver, driver.opens("a", held=held) + driver.opens("b", held=held)) == {}
    assert told(driver, driver.asks("a", 6) + driver.passes(3)) == {}, "a has committed step 5, b is about to"
    assert announced(driver.asks("b", 6)).quorum_id == 1


def test_a_stranger_that_asks_for_an_old_step_breaks_no_round() -> None:
    driver = taken_over("a", "b")
    driver.opens("a", held=HeldAnswer(1, 1, 5))
    driver.opens("z")
    assert told(driver, driver.asks("z", 0)) == {}


def test_a_lighthouse_without_its_store_waits_for_whoever_was_there() -> None:
    driver = Driver(min_replicas=1, heartbeat_timeout=5)
    driver.opens("a", seen=9)
    assert not announces(driver.asks("a", 7) + driver.passes(4))
    driver.opens("b", seen=9, held=HeldAnswer(1, 9, 6))
    driver.asks("b", 7)
    announce = announced(driver.passes(1))
    assert (announce.quorum_id, members(announce)) == (10, ["a", "b"])


def test_a_late_hello_with_a_higher_quorum_id_does_not_stop_a_running_job() -> None:
    driver = Driver(min_replicas=1, heartbeat_timeout=5)
    driver.start("a")
    driver.opens("b", seen=9)
    driver.asks("b")
    announce = announced(driver.asks("a", 1))
    assert announce.quorum_id == 10


def test_every_tell_goes_to_an_open_session() -> None:
    driver = taken_over("a", "b", "c")
    driver.open_all("a", "b", "c")
    driver.closes("a")
    decisions = driver.fails("b") + driver.evicts("c")
    sessions = {session for decision in decisions if isinstance(decision, Tell) for session in decision.to}
    assert all(driver.replica_of[session] == "c" for session in sessions)
