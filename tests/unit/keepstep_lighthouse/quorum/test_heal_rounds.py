"""Groups that heal before a step ask for that step again, and the quorum that it begins with waits for all of them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep_mesh.protocol.lineage import is_diverged
from keepstep_mesh.protocol.membership import StateRoot
from keepstep_mesh.protocol.messages import Healing
from tests.support.models.core_driver import Driver, announced

HEALED = Healing(100, 100, 10.0, 0, "a", "direct", 4.0, ended=True)
UNDER_WAY = replace(HEALED, bytes_done=1, ended=False)


@pytest.fixture
def driver() -> Driver:
    """``a`` has the state of the first step, ``b`` and ``c`` heal from it."""
    one = Driver(min_replicas=1, heal_timeout=60.0)
    one.open_all("a", "b", "c")
    for name in "abc":
        one.asks(name, 0, name)
    for name in "bc":
        one.reports(name, UNDER_WAY)
    return one


def test_the_step_begins_under_the_same_quorum_when_all_have_healed(driver: Driver) -> None:
    before = driver.record.quorum_id
    assert driver.asks("a", 0, "a") == [], "no group gets RoundBroken"
    assert driver.core.reason(driver.now).code == "healing"
    driver.reports("b", HEALED)
    assert driver.asks("b", 0, "a") == []
    driver.reports("c", HEALED)
    answer = announced(driver.asks("c", 0, "a"))
    assert (answer.quorum_id, answer.step, answer.lineage) == (before, 0, "a")
    assert {(one.step, one.lineage) for one in answer.members} == {(0, "a")}


def test_it_is_no_step_that_was_committed_or_failed(driver: Driver) -> None:
    driver.asks("a", 0, "a")
    assert (driver.core.tally.committed, driver.core.tally.discarded) == (0, 0)
    for name in "bc":
        driver.reports(name, HEALED)
        driver.asks(name, 0, "a")
    driver.all_ask("abc", 1, 1)
    assert (driver.core.tally.committed, driver.core.tally.discarded) == (3, 0)


def test_one_that_heals_for_too_long_is_left_behind(driver: Driver) -> None:
    driver.asks("a", 0, "a")
    driver.reports("b", HEALED)
    driver.asks("b", 0, "a")
    driver.passes(59.0)
    assert driver.core.reason(driver.now).code == "healing"
    answer = announced(driver.passes(1.5))
    assert {one.replica_id for one in answer.members} == {"a", "b"}


@pytest.mark.parametrize(
    ("heal", "diverged"),
    [(HEALED, False), (replace(HEALED, error="TransferError: the source died"), True), (UNDER_WAY, True)],
    ids=["healed", "failed", "not told"],
)
def test_a_diverged_group_that_healed_may_ask_for_the_same_state_again(heal: Healing, diverged: bool) -> None:
    driver = Driver(min_replicas=1, verify_every=1)
    driver.open_all("a", "b", "c")
    driver.all_ask("abc", 4, 4)
    roots = {"a": "aa", "b": "aa", "c": "cc"}
    found = announced([one for name in "abc" for one in driver.asks(name, 5, 5, root=StateRoot(4, 4, roots[name]))])
    assert [one.replica_id for one in found.members if is_diverged(one.lineage)] == ["c"]
    driver.reports("c", heal)
    driver.all_ask("ab", 5, 5)
    answer = announced(driver.asks("c", 5, 5))
    assert [one.replica_id for one in answer.members if is_diverged(one.lineage)] == ["c"] * diverged
