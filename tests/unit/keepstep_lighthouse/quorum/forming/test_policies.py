"""Policies: which can work, and what a change does to a round that is under way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep_lighthouse.quorum.events import LogEntry, Persist
from keepstep_lighthouse.quorum.views.replicas import ReplicaState
from keepstep_mesh.protocol.policy import Policy, policy_problem
from tests.support.models.core_driver import Driver, announced, announces, logged, members


@pytest.mark.parametrize(
    ("policy", "problem"),
    [
        (Policy(), None),
        (Policy(3, 3, 0, 0, 0, 0.1, 0, 0), None),
        (Policy(min_replicas=0), "min_replicas must be at least 1"),
        (Policy(max_replicas=-1), "max_replicas must be 0"),
        (Policy(min_replicas=3, max_replicas=2), "max_replicas 2 is less than min_replicas 3"),
        (Policy(join_timeout=-1), "join_timeout must be"),
        (Policy(heal_timeout=float("nan")), "heal_timeout must be"),
        (Policy(reconnect_grace=float("inf")), "reconnect_grace must be"),
        (Policy(takeover_grace=-0.1), "takeover_grace must be"),
        (Policy(heartbeat_timeout=0), "heartbeat_timeout must be at least 0.1 s, not 0"),
        (Policy(min_replicas=10**400), "min_replicas must be at least 1 (at most 100000)"),
        (Policy(heal_timeout=1e300), "heal_timeout must be"),
        (Policy(join_timeout=10**400), "join_timeout must be"),
    ],
)
def test_a_policy_that_cannot_work_is_named(policy: Policy, problem: str | None) -> None:
    found = policy_problem(policy)
    assert (found is None) if problem is None else (found is not None and found.startswith(problem))


def test_an_unusable_policy_changes_nothing() -> None:
    driver = Driver(min_replicas=1)
    before = driver.core.record.policy
    assert driver.sets_policy(Policy(min_replicas=0)) == []
    assert driver.core.record.policy == before
    assert before.min_replicas == 1


def test_a_policy_change_is_written_and_can_complete_a_quorum() -> None:
    driver = Driver(min_replicas=2)
    driver.open_all("a")
    driver.asks("a")
    decisions = driver.sets_policy(replace(driver.record.policy, min_replicas=1))
    assert driver.record.policy.min_replicas == 1
    assert members(announced(decisions)) == ["a"]
    (entry,) = [one for one in decisions if isinstance(one, LogEntry) and one.kind == "policy"]
    assert entry.detail == {
        "by": "ann",
        "changed": {"min_replicas": 1},
        "before": {"min_replicas": 2},
        "quorum_id": 0,
    }
    kinds = [type(one) for one in decisions]
    assert kinds.index(Persist) < kinds.index(LogEntry), "written before anybody can hear of it"
    assert driver.sets_policy(driver.record.policy) == [], "once is enough"


def test_a_shorter_join_timeout_ends_a_wait_that_began_before() -> None:
    driver = Driver(min_replicas=1, join_timeout=100)
    driver.open_all("a", "b", "c")
    driver.asks("a")
    driver.asks("b")
    driver.passes(20)
    driver.sets_policy(replace(driver.record.policy, join_timeout=30))
    assert not announces(driver.passes(9.9))
    assert members(announced(driver.passes(0.1))) == ["a", "b"]


def test_a_shorter_heartbeat_timeout_counts_from_when_workers_can_know_of_it() -> None:
    driver = Driver(min_replicas=1, heartbeat_timeout=60)
    driver.start("a", "b")
    driver.passes(10, silent=["b"])
    driver.sets_policy(replace(driver.record.policy, heartbeat_timeout=5))
    assert driver.passes(4.9, silent=["b"]) == []
    assert [one.replica_id for one in driver.core.replicas(driver.now) if one.state is not ReplicaState.GONE] == [
        "a",
        "b",
    ]
    driver.passes(0.1, silent=["b"])
    assert ("lost", "b") in logged(driver.log)
    assert ("lost", "a") not in logged(driver.log)
