"""A new leader decides nothing before the lease of the previous one, or the takeover grace, is over."""

from __future__ import annotations

from dataclasses import replace

from tests.support.models.core_driver import Driver, announced, announces, logged, members


def fenced(takeover_grace: float | None = None) -> Driver:
    """a and b were a quorum; the leader before may be alive for 9 s more."""
    driver = Driver(min_replicas=1, takeover_grace=takeover_grace)
    driver.start("a", "b")
    driver.restart(fenced_until=driver.now + 9)
    return driver


def test_under_a_fence_nothing_is_decided_before_the_lease_of_the_leader_before_is_over() -> None:
    driver = fenced(takeover_grace=2)
    driver.opens("c")
    driver.asks("c")
    assert not announces(driver.passes(8.9))
    assert ("lost", "a") not in logged(driver.log)
    assert members(announced(driver.passes(0.2))) == ["c"]


def test_a_member_that_speaks_under_the_new_epoch_lifts_the_fence_and_one_that_has_only_come_does_not() -> None:
    driver = fenced(takeover_grace=2)
    driver.opens("a")
    assert not announces(driver.passes(3, silent=["a"]))
    assert ("lost", "b") not in logged(driver.log)
    decisions = driver.asks("a", failures=1) + driver.passes(0.5)
    assert ("lost", "b") in logged(driver.log)
    assert members(announced(decisions)) == ["a"]


def test_members_that_are_all_back_decide_once_one_of_them_has_spoken() -> None:
    driver = fenced()
    driver.open_all("a", "b")
    driver.evicts("b")
    assert members(announced(driver.asks("a", failures=1))) == ["a"]


def test_a_shorter_takeover_grace_lifts_no_fence() -> None:
    driver = fenced(takeover_grace=100)
    driver.opens("c")
    driver.asks("c")
    driver.sets_policy(replace(driver.record.policy, takeover_grace=1.0))
    assert not announces(driver.passes(8.9))
    assert members(announced(driver.passes(0.2))) == ["c"]


def test_a_stranger_that_speaks_lifts_no_fence() -> None:
    driver = fenced(takeover_grace=2)
    driver.opens("c")
    driver.asks("c")
    driver.beats("c")
    assert not announces(driver.passes(5))


def test_a_shorter_takeover_grace_ends_one_that_is_under_way() -> None:
    driver = Driver(min_replicas=1, takeover_grace=100)
    driver.start("a", "b")
    driver.restart()
    driver.opens("a")
    driver.asks("a", failures=1)
    driver.passes(10)
    driver.sets_policy(replace(driver.record.policy, takeover_grace=15.0))
    assert not announces(driver.passes(4.9))
    assert members(announced(driver.passes(0.1))) == ["a"]
