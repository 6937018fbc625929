"""Reasons as sentences, and the views of the quorum and of each group."""

from __future__ import annotations

import pytest

from keepstep_lighthouse.quorum.events import Reason
from keepstep_lighthouse.quorum.views.reasons import named
from keepstep_lighthouse.quorum.views.replicas import ReplicaState, ReplicaView
from keepstep_mesh.protocol.membership import MemberInfo
from keepstep_mesh.protocol.messages import Denied
from keepstep_mesh.protocol.policy import Policy
from tests.support.models.core_driver import Driver, told


def view_of(driver: Driver, replica_id: str) -> ReplicaView:
    (view,) = [view for view in driver.core.replicas(driver.now) if view.replica_id == replica_id]
    return view


def reason_of(driver: Driver, replica_id: str) -> Reason:
    reason = view_of(driver, replica_id).reason
    assert reason is not None
    return reason


def waiting(driver: Driver) -> Reason:
    return driver.core.reason(driver.now)


# ---- of the job


def test_while_nobody_asks_the_reason_says_how_many_are_healthy() -> None:
    driver = Driver(min_replicas=1)
    driver.open_all("a", "b")
    assert waiting(driver) == Reason(
        "nobody", {"asking": 0, "healthy": 2, "members": 0}, "no group has asked for a quorum; 2 healthy"
    )


def test_stragglers_are_named_with_the_time_that_is_left() -> None:
    driver = Driver(min_replicas=1)
    driver.open_all("r0", "r1", "r2")
    driver.asks("r0")
    driver.asks("r1")
    driver.passes(18.8)
    reason = waiting(driver)
    assert (
        reason.sentence == "waiting for 1 of 3 groups: r2 is connected but has not asked, 41.2 s of join_timeout left"
    )
    assert reason.numbers["seconds_left"] == pytest.approx(41.2)


def test_a_request_whose_time_ends_before_that_of_the_stragglers_is_told_what_to_set() -> None:
    driver = Driver(min_replicas=1)
    driver.open_all("r0", "r1", "r2")
    driver.asks("r0", timeout=10.0)
    driver.asks("r1", timeout=90.0)
    (denied,) = told(driver, driver.passes(10.0))["r0"]
    assert isinstance(denied, Denied)
    assert denied.reason == (
        "waiting for 1 of 3 groups: r2 is connected but has not asked, 50.0 s of join_timeout left, "
        "but none of the request's quorum_timeout: set quorum_timeout above join_timeout"
    )


def test_a_lost_group_is_distinguished_from_one_that_only_heartbeats() -> None:
    driver = Driver(min_replicas=1)
    driver.open_all("a", "b", "c", "d", "e")
    for one in "abc":
        driver.asks(one)
    driver.closes("e")
    assert waiting(driver).sentence.startswith(
        "waiting for 2 of 5 groups: d is connected but has not asked; e lost its connection and may reconnect"
    )


def test_a_heal_is_told_with_its_bytes_and_rate() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a", "b")
    mib = 1024 * 1024
    driver.heals("b", 120 * mib, 512 * mib, 60.0 * mib)
    driver.asks("a", 1)
    assert waiting(driver).sentence == (
        "waiting for 1 of 2 groups: b is healing, 120 of 512 MiB at 60 MiB/s, 60.0 s of heal_timeout left"
    )


def test_a_takeover_names_who_is_missing() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a", "b", "c")
    driver.restart()
    driver.opens("a")
    driver.asks("a", 1)
    reason = waiting(driver)
    assert (reason.code, reason.numbers["absent"]) == ("takeover_grace", 2)
    assert "2 of 3 members to reconnect: b, c; 5.0 s" in reason.sentence


def test_at_most_five_are_named() -> None:
    assert named("abcde") == "a, b, c, d, e"
    assert named("abcdefgh") == "a, b, c, d, e and 3 more"


def test_the_picture_of_the_quorum_says_why_there_is_no_next_one_and_how_the_last_one_came() -> None:
    driver = Driver(min_replicas=1)
    view = driver.core.quorum_view(driver.now)
    assert (view.quorum_id, view.formed) == (0, None)
    driver.start("a", "b")
    driver.opens("c")
    driver.all_ask("ab", 7, 1)
    driver.asks("b", 8, 1)
    view = driver.core.quorum_view(driver.now)
    assert (view.quorum_id, view.members, view.step, view.lineage) == (1, ("a", "b"), 7, 1)
    assert (view.asking, view.healthy, view.joiners) == (("b",), 3, 1)
    assert view.reason.code == "majority"
    assert view.formed is not None
    assert view.formed.code == "fast"


# ---- of one group


def test_a_younger_namesake_is_told_whom_it_waits_for() -> None:
    driver = Driver(min_replicas=1)
    driver.open_all("a:1", "a:2")
    assert reason_of(driver, "a:2") == Reason(
        "duplicate_name",
        {},
        "a:2 waits: a:1 has the same name and is healthy; a second `keepstep run` of one job needs --first-replica N",
    )


def test_a_group_beyond_max_replicas_is_told_so() -> None:
    driver = Driver(policy=Policy(1, max_replicas=1))
    driver.start("a")
    driver.opens("b")
    driver.asks("b")
    assert reason_of(driver, "b").code == "max_replicas"


def test_a_joiner_is_told_that_the_members_shrink() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a", "b")
    driver.opens("c")
    driver.asks("c")
    driver.asks("a", 1, shrink=True)
    assert reason_of(driver, "c").code == "not_in_shrink"


def test_a_group_whose_layout_does_not_fit_is_told_so() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a")
    driver.asks("a", 1, info=MemberInfo(layout="x"))
    driver.opens("b")
    driver.asks("b", info=MemberInfo(layout="y"))
    assert reason_of(driver, "b").code == "layout"


def test_a_group_that_is_gone_keeps_its_reason() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a", "b")
    driver.leaves("b", "preempted")
    assert reason_of(driver, "b") == Reason("gone", {}, "left at step 1: preempted")


def test_a_group_is_idle_asks_trains_heals_is_suspect_gone_or_absent() -> None:
    driver = Driver(min_replicas=2)
    driver.opens("a")
    assert view_of(driver, "a").state is ReplicaState.IDLE
    driver.asks("a")
    assert view_of(driver, "a").state is ReplicaState.ASKING
    driver.opens("b")
    driver.asks("b", info=MemberInfo("http://b", world_size=4))
    assert view_of(driver, "a").state is ReplicaState.TRAINING
    driver.heals("b", 3, 7)
    view = view_of(driver, "b")
    assert (view.state, view.healed_bytes, view.heal_bytes) == (ReplicaState.HEALING, 3, 7)
    assert (view.address, view.world_size, view.member) == ("http://b", 4, True)
    driver.closes("b")
    driver.passes(0.1)
    view = view_of(driver, "b")
    assert view.state is ReplicaState.SUSPECT
    assert view.heard_seconds_ago == pytest.approx(0.1)
    driver.passes(0.1)
    view = view_of(driver, "b")
    assert (view.state, view.member) == (ReplicaState.GONE, False)
    driver.restart()
    assert view_of(driver, "a").state is ReplicaState.ABSENT
