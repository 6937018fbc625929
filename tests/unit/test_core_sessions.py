"""Connections, requests, losses: who counts, who is told, who is answered."""

from __future__ import annotations

import pytest

from core_driver import BEAT_SECONDS, Driver, announced, announces, logged, members, told
from keepstep_lighthouse.core import GONE_SECONDS, LATE_SECONDS, MAX_GONE, MAX_LOSSES_TOLD
from keepstep_lighthouse.events import (
    Asked,
    Cancelled,
    Closed,
    Decision,
    EndSession,
    Event,
    GroupFailed,
    HealProgress,
    Heard,
    LeftOnPurpose,
    MovedAway,
    Persist,
    Policy,
)
from keepstep_lighthouse.views import ReplicaState
from keepstep_mesh.messages import (
    Denied,
    Goodbye,
    HeldAnswer,
    MemberInfo,
    MemberLost,
    QuorumRequest,
    Refused,
    RoundBroken,
)

HOLDS = HeldAnswer(1, 1, 0)


def states(driver: Driver) -> dict[str, ReplicaState]:
    return {view.replica_id: view.state for view in driver.core.replicas(driver.now)}


# ---- section 7 of SEMANTICS: what was seen wrong elsewhere


def test_row_1_quorum_id_goes_on_growing_after_a_restart() -> None:
    driver = Driver(min_replicas=1)
    assert driver.start("a", "b").quorum_id == 1
    driver.restart()
    driver.open_all("a", "b")
    assert announced(driver.all_ask("ab", 0, failures=1)).quorum_id == 2
    driver.restart()
    driver.open_all("a")
    driver.passes(5)
    assert announced(driver.asks("a", 1, failures=1)).quorum_id == 3


def test_row_1_quorum_id_goes_on_growing_after_the_store_was_lost() -> None:
    driver = Driver(min_replicas=1)
    decisions = driver.opens("a", seen=41)
    assert decisions[0] == Persist(driver.record), "written before anything else"
    assert driver.record.quorum_id == 41
    driver.asks("a", 7, 41)
    assert announced(driver.passes(5)).quorum_id == 42


def test_row_2_shrink_only_never_makes_a_quorum_that_is_too_small_or_empty() -> None:
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


def test_row_2_a_lone_joiner_gets_no_quorum_below_min_replicas() -> None:
    driver = Driver(min_replicas=2)
    driver.start("a", "b")
    driver.leaves("a")
    driver.leaves("b")
    driver.opens("z")
    assert not announces(driver.asks("z", shrink=True))
    assert not announces(driver.asks("z") + driver.passes(100))


def test_row_3_a_cancelled_request_is_in_no_quorum() -> None:
    driver = Driver(min_replicas=1)
    driver.open_all("a", "b", "c")
    driver.asks("a")
    driver.cancels("a")
    driver.asks("b")
    driver.asks("c")
    assert members(announced(driver.passes(60))) == ["b", "c"]


def test_row_3_a_request_whose_session_ended_is_in_no_quorum() -> None:
    driver = Driver(min_replicas=1)
    driver.open_all("a", "b", "c")
    driver.asks("a")
    driver.closes("a")
    driver.opens("a")
    driver.asks("b")
    driver.asks("c")
    assert members(announced(driver.passes(60))) == ["b", "c"]


def test_row_8_the_dead_are_forgotten() -> None:
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


def test_row_8_requests_that_come_faster_than_rounds_do_not_pile_up() -> None:
    driver = Driver(min_replicas=2)
    driver.opens("a")
    for _ in range(1000):
        driver.asks("a")  # validate() bounds what is kept


def test_row_13_survivors_of_a_kill_are_told_within_the_reconnect_grace_or_sooner() -> None:
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
    assert messages == {"a": [MemberLost(2, "c", "its connection ended and most of its quorum report it broken")]}


def test_row_15_an_unchanged_quorum_is_neither_written_nor_listed_again() -> None:
    driver = Driver(min_replicas=1)
    first = driver.start("a", "b")
    for step in range(1, 5):
        decisions = driver.all_ask("ab", step, 1)
        again = announced(decisions)
        assert decisions == [again], "nothing but the answer: no write, no log"
        assert (again.quorum_id, again.version) == (first.quorum_id, first.version)
        assert again.uniform
        assert (again.step, again.lineage) == (step, 1)


def test_row_17_groups_at_an_equal_step_with_different_weights_are_told_apart_by_their_lineage() -> None:
    driver = Driver(min_replicas=1)
    driver.open_all("a", "b", "c")
    driver.asks("a", 5, 3)
    driver.asks("b", 5, 4)
    announce = announced(driver.asks("c", 5, 3))
    assert not announce.uniform, "everybody gets the list, and sees who has to heal"
    assert (announce.step, announce.lineage) == (5, 4), "the later commit counts, not the greater number"


# ---- the member list and its version


def test_a_changed_info_makes_a_new_list() -> None:
    driver = Driver(min_replicas=1)
    first = driver.start("a", "b")
    driver.asks("a", 1, info=MemberInfo("http://new"))
    again = announced(driver.asks("b", 1))
    assert again.version > first.version
    assert again.quorum_id == first.quorum_id
    assert again.members[0].info.address == "http://new"
    assert again.members[0].step == 1


def test_a_list_with_differing_facts_is_new_each_time_and_so_is_the_first_common_one() -> None:
    driver = Driver(min_replicas=1)
    versions = [driver.start("a", "b").version]
    for steps in ((1, 1), (2, 1), (2, 1), (3, 3), (4, 4)):
        driver.asks("a", steps[0])
        announce = announced(driver.asks("b", steps[1]))
        assert announce.uniform == (steps[0] == steps[1])
        versions.append(announce.version)
    assert versions == [1, 1, 2, 3, 4, 4]


def test_who_needs_the_list_later_gets_the_facts_of_that_round() -> None:
    driver = Driver(min_replicas=1)
    first = driver.start("a", "b")
    driver.all_ask("ab", 1, 1)
    driver.asks("a", 2, 1)
    announce = announced(driver.asks("b", 2, 1, request=3))
    assert announce.version == first.version
    assert [(member.step, member.lineage) for member in announce.members] == [(2, 1), (2, 1)]
    driver.closes("b")
    driver.opens("b")
    again = announced(driver.asks("b", 2, 1, request=3))
    assert again.members == announce.members


def test_a_failed_commit_and_shrink_only_are_facts_of_the_list() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a")
    failed = announced(driver.asks("a", failures=2))
    assert not failed.uniform
    assert failed.members[0].commit_failures == 2
    shrinking = announced(driver.asks("a", shrink=True))
    assert not shrinking.uniform
    assert shrinking.members[0].shrink_only
    assert announced(driver.asks("a")).uniform


def test_the_reference_state_of_a_mixed_list_is_the_furthest() -> None:
    driver = Driver(min_replicas=1)
    driver.open_all("a", "b", "c")
    driver.asks("a", 5, 3)
    driver.asks("b", 5, 4)
    announce = announced(driver.asks("c", 2, 9))
    assert (announce.step, announce.lineage) == (5, 4)


def test_joiners_are_those_that_could_come_in() -> None:
    driver = Driver(policy=Policy(1, max_replicas=3))
    driver.start("a:1", "b:1")
    driver.open_all("c:1", "d:1", "a:2")
    assert announced(driver.all_ask(["a:1", "b:1"], 1)).joiners == 1, (
        "two wait, one has room, a namesake does not count"
    )


# ---- requests


def test_a_request_resent_after_a_reconnect_gets_the_same_answer() -> None:
    driver = Driver(min_replicas=1)
    first = driver.start("a", "b")
    driver.closes("b")
    driver.opens("b")
    again = announced(driver.asks("b", request=1))
    assert again.to == ((driver.session_of["b"], 1),)
    assert (again.quorum_id, again.version, again.members) == (first.quorum_id, first.version, first.members)
    assert announced(driver.all_ask("ab", 1)).quorum_id == 1


def test_a_request_resent_for_an_answer_that_is_out_of_date_is_asked_anew() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a", "b", "c")
    driver.closes("b")
    driver.fails("c")
    driver.opens("b")
    assert not announces(driver.asks("b", request=1)), "c is lost, nobody can complete that round"
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


def test_a_client_that_was_restarted_under_its_old_id_may_count_anew() -> None:
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
    assert told(driver, driver.passes(0.1)) == {"a": [Denied(1, "deadline", "1 of at least 2 groups ask")]}
    assert not announces(driver.asks("b"))
    assert announces(driver.asks("a"))


def test_deadlines_fire_in_their_own_order() -> None:
    driver = Driver(min_replicas=9)
    driver.open_all("a", "b", "c")
    for replica_id, timeout in (("a", 3.0), ("b", 1.0), ("c", 2.0)):
        driver.asks(replica_id, timeout=timeout)
    assert [list(told(driver, driver.passes(1))) for _ in range(3)] == [["b"], ["c"], ["a"]]


def broken_for(driver: Driver, decisions: list[Decision]) -> list[str]:
    """Who is told that its round is broken."""
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
    assert broken_for(driver, driver.leaves("b") + driver.passes(0.19)) == []
    assert broken_for(driver, driver.passes(0.01)) == ["c"]


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


@pytest.mark.parametrize(
    "event",
    [
        Asked(99, QuorumRequest(1, 0, "", False, 0, 1000)),
        Closed(99),
        Heard(99),
        Cancelled(99, 1),
        HealProgress(99, 1, 2, 3.0),
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


def test_step_seconds_are_from_answer_to_next_request() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a")
    driver.passes(1.5)
    driver.asks("a", 1)
    assert driver.core.replicas(driver.now)[0].step_seconds == pytest.approx(1.5)


# ---- going


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
    messages = told(driver, driver.passes(LATE_SECONDS, silent="b"))
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


# ---- names and layouts


def test_the_older_incarnation_of_a_name_wins_while_it_is_healthy() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a:1")
    driver.opens("a:2")
    driver.asks("a:2")
    view = next(view for view in driver.core.replicas(driver.now) if view.replica_id == "a:2")
    assert view.state is ReplicaState.KEPT_OUT
    assert view.reason is not None
    assert view.reason.code == "duplicate_name"
    assert members(announced(driver.asks("a:1", 1))) == ["a:1"]
    assert members(announced(driver.leaves("a:1"))) == ["a:2"], "its open request counts from then on"


def test_of_three_incarnations_the_oldest_left_counts() -> None:
    driver = Driver(min_replicas=1)
    driver.open_all("a:1", "a:2", "a:3")
    driver.asks("a:3")
    driver.leaves("a:1")
    driver.leaves("a:3")
    assert members(announced(driver.asks("a:2"))) == ["a:2"]


def test_after_a_restart_the_member_wins_although_it_comes_back_later() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a:1", "b:1")
    driver.restart()
    driver.opens("a:2")
    driver.asks("a:2")
    driver.opens("a:1")
    driver.opens("b:1")
    assert members(announced(driver.all_ask(["a:1", "b:1"], 1))) == ["a:1", "b:1"]


def layout(text: str) -> MemberInfo:
    return MemberInfo(f"http://{text}", layout=text)


def test_a_group_with_other_parameters_is_denied_and_nobody_waits_for_it() -> None:
    driver = Driver(min_replicas=1)
    driver.open_all("a", "b")
    driver.asks("a", info=layout("x"))
    decisions = driver.asks("b", info=layout("y"))
    (message,) = told(driver, decisions)["b"]
    assert isinstance(message, Denied)
    assert (message.code, message.peer_address) == ("layout", "http://x")
    assert members(announced(decisions)) == ["a"]
    assert members(announced(driver.asks("a", 1))) == ["a"]
    driver.asks("b", info=layout("x"))
    assert members(announced(driver.asks("a", 2))) == ["a", "b"]


def test_the_layout_of_a_member_beats_that_of_who_asked_first_after_a_restart() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a", "b")
    driver.restart()
    driver.opens("z")
    driver.asks("z", info=layout("wrong"))
    driver.open_all("a", "b")
    assert "z" in told(driver, driver.asks("a", 1, info=layout("right")))
    assert members(announced(driver.asks("b", 1, info=layout("right")))) == ["a", "b"]


def test_a_lone_group_may_change_its_layout_and_the_job_is_free_when_all_are_gone() -> None:
    driver = Driver(min_replicas=1)
    driver.opens("a")
    driver.asks("a", info=layout("x"))
    assert announces(driver.asks("a", 1, info=layout("y")))
    driver.leaves("a")
    driver.opens("b")
    assert announces(driver.asks("b", info=layout("z")))


def test_an_unknown_layout_fits_all() -> None:
    driver = Driver(min_replicas=2)
    driver.open_all("a", "b")
    driver.asks("a", info=layout("x"))
    assert announces(driver.asks("b"))
