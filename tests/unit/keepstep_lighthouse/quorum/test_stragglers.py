"""A straggler is drained only if the policy says so, and only one that can be spared."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from keepstep_lighthouse.quorum.events import LogEntry, StragglerFound, Tell
from keepstep_lighthouse.quorum.views.replicas import ReplicaState
from keepstep_mesh.protocol.messages import Drain
from tests.support.models.core_driver import Driver

ALL = ("a:1", "b:1", "c:1", "d:1")


def trained(steps: int = 5, **policy: float) -> Driver:
    """Four groups, and the steps that each has committed."""
    driver = Driver(**{"min_replicas": 2, "drain_straggler_after": 5, **policy})
    driver.start(*ALL)
    train(driver, 1, steps)
    return driver


def train(driver: Driver, first: int, steps: int, groups: tuple[str, ...] = ALL) -> None:
    for step in range(first, first + steps):
        driver.all_ask(groups, step)


def why(driver: Driver, replica_id: str, steps: int) -> str | None:
    return driver.core.stays(StragglerFound(replica_id, steps, 0.5, 0.1, "metrics"))


def test_a_straggler_is_drained_and_the_event_says_why_and_who_said_so() -> None:
    driver = trained()
    assert why(driver, "c:1", 7) is None
    told, logged = driver.finds_straggler("c:1", 7)
    reason = "it was a straggler for 7 steps in a row: it needs 0.5 s for a step, the median of the groups is 0.1 s"
    assert told == Tell((driver.session_of["c:1"],), Drain(reason))
    assert logged == LogEntry("drain", "c:1", {"reason": reason, "by": "metrics"})


def drain_another(driver: Driver) -> None:
    driver.drains("a")


def lose_a_connection(driver: Driver) -> None:
    driver.closes("a:1")


def heal_one(driver: Driver) -> None:
    driver.heals("a:1")


def let_one_follow(driver: Driver) -> None:
    for name, lineage in (("a:1", "follows:1"), ("b:1", 1), ("c:1", 1), ("d:1", 1)):
        driver.asks(name, 6, lineage)


def join(driver: Driver) -> None:
    driver.opens("e:1")


def nothing(_: Driver) -> None: ...


@pytest.mark.parametrize(
    ("policy", "before", "replica_id", "steps", "said"),
    [
        ({"drain_straggler_after": 0}, nothing, "c:1", 10**9, "drain_straggler_after is 0"),
        ({}, nothing, "c:1", 4, "a straggler for 4 steps in a row, and drain_straggler_after is 5"),
        ({}, nothing, "c:2", 9, "it is not a member of the quorum"),
        ({}, nothing, "c", 9, "it is not a member of the quorum"),
        ({}, join, "e:1", 9, "it is not a member of the quorum"),
        ({}, drain_another, "c:1", 9, "a:1 is draining, and groups drain one at a time"),
        ({"min_replicas": 4}, nothing, "c:1", 9, "3 would be left, and min_replicas is 4"),
        ({"min_replicas": 3}, lose_a_connection, "c:1", 9, "2 would be left, and min_replicas is 3"),
        ({"min_replicas": 3}, heal_one, "c:1", 9, "2 would be left, and min_replicas is 3"),
        ({"min_replicas": 3}, let_one_follow, "c:1", 9, "2 would be left, and min_replicas is 3"),
        ({"drain_straggler_after": 6}, nothing, "c:1", 9, "committed 5 steps since it connected"),
    ],
)
def test_a_straggler_stays_when(
    policy: dict[str, float], before: Callable[[Driver], None], replica_id: str, steps: int, said: str
) -> None:
    driver = trained(**policy)
    before(driver)
    assert said in (why(driver, replica_id, steps) or "it is drained")
    assert driver.finds_straggler(replica_id, steps) == []


def test_of_two_stragglers_the_second_goes_when_the_first_has_left() -> None:
    driver = trained()
    assert driver.finds_straggler("c:1", 5)
    assert driver.finds_straggler("c:1", 6) == [], "it is asked once"
    assert driver.finds_straggler("d:1", 6) == []
    driver.leaves("c:1")
    assert driver.finds_straggler("d:1", 6)
    driver.leaves("d:1")
    train(driver, 6, 5, ("a:1", "b:1"))
    assert "1 would be left" in (why(driver, "a:1", 50) or "")


def test_a_group_that_came_back_is_not_drained_before_it_has_trained() -> None:
    driver = trained()
    driver.finds_straggler("c:1", 5)
    driver.leaves("c:1")
    again = ("a:1", "b:1", "c:2", "d:1")
    driver.opens("c:2")
    driver.all_ask(again, 6)
    train(driver, 7, 4, again)
    assert "committed 4 steps since it connected" in (why(driver, "c:2", 1000) or "")
    driver.asks("c:2", 10, failures=1)
    assert "committed 4 steps" in (why(driver, "c:2", 1000) or ""), "a discarded step is none"
    driver.all_ask(("a:1", "b:1", "d:1"), 11)
    train(driver, 12, 2, again)
    assert driver.finds_straggler("c:2", 1000)


def test_nobody_is_drained_by_a_lighthouse_that_does_not_know_the_groups_yet() -> None:
    driver = trained()
    driver.restart()
    driver.open_all("b:1", "c:1", "d:1")
    assert "committed 0 steps" in (why(driver, "c:1", 1000) or "")


HAPPENS = st.one_of(
    st.tuples(st.just("is slow"), st.sampled_from("abcd"), st.integers(1, 4)),
    st.tuples(st.just("trains"), st.just("all"), st.integers(1, 3)),
    st.tuples(
        st.sampled_from(["leaves", "closes", "fails", "evicts", "comes", "drains"]), st.sampled_from("abcd"), st.just(1)
    ),
)


@given(st.integers(1, 3), st.integers(1, 3), st.lists(HAPPENS, max_size=30))
def test_at_most_one_straggler_goes_at_a_time_after_it_has_trained_and_enough_stay(
    min_replicas: int, after: int, happens: list[tuple[str, str, int]]
) -> None:
    driver = trained(1, min_replicas=min_replicas, drain_straggler_after=after)
    names = {name: f"{name}:1" for name in "abcd"}
    steps, total = dict.fromkeys(ALL, 1), 1
    for what, who, count in happens:
        there = [one for one in driver.core.replicas(driver.now) if one.state is not ReplicaState.GONE]
        connected = [one for one in there if one.replica_id in driver.session_of]
        replica_id = names.get(who, "")
        if what == "is slow":
            if driver.finds_straggler(replica_id, count):
                event("drained")
                assert after <= min(count, steps[replica_id])
                assert not any(one.draining for one in there)
                assert sum(one.member and one.replica_id != replica_id for one in connected) >= min_replicas
        elif what == "trains":
            for _ in range(count):
                total += 1
                for one in connected:
                    steps[one.replica_id] = steps.get(one.replica_id, -1) + 1  # the first time it only asks
                    driver.asks(one.replica_id, total)
        elif what == "comes" and replica_id not in {one.replica_id for one in there}:
            names[who] = f"{who}:{len(driver.replica_of) + 1}"
            driver.opens(names[who])
        elif what == "drains" and replica_id in driver.session_of:
            driver.drains(replica_id)
        elif what in ("leaves", "closes", "fails", "evicts") and replica_id in driver.session_of:
            getattr(driver, what)(replica_id)
