"""Heals in the lighthouse: those under way, and how each began and ended."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep_lighthouse.quorum.views.replicas import HealView, ReplicaState
from keepstep_mesh.protocol.messages import Healing
from tests.support.models.core_driver import Driver, logged, states

MIB = 1 << 20
BEGUN = Healing(0, 0, 0.0, 7, "a")
HALF = Healing(50 * MIB, 100 * MIB, 25.0 * MIB, 7, "a", "direct", 2.0)
HEALED = Healing(100 * MIB, 100 * MIB, 25.0 * MIB, 7, "a", "direct", 4.0, ended=True)
FAILED = replace(HALF, ended=True, error="TransferError: the source died")


@pytest.fixture
def driver() -> Driver:
    one = Driver(min_replicas=1)
    one.start("a", "b")
    return one


def ends(driver: Driver) -> list[tuple[str, dict[str, object]]]:
    return [(one.kind, one.detail) for one in driver.log if one.kind in ("healed", "heal_failed")]


def test_a_heal_under_way_is_shown_with_its_rate_and_the_time_left(driver: Driver) -> None:
    driver.reports("b", BEGUN)
    assert driver.core.heals(driver.now) == (HealView("b", 7, "a", "", 0, 0, 0.0, None, 0.0),)
    driver.passes(2.0)
    driver.reports("b", HALF)
    (view,) = driver.core.heals(driver.now)
    assert (view.via, view.bytes_done, view.bytes_total) == ("direct", 50 * MIB, 100 * MIB)
    assert view.seconds_left == 2.0
    assert view.began_seconds_ago == pytest.approx(2.0)
    assert states(driver)["b"] is ReplicaState.HEALING


def test_a_heal_that_stands_still_has_no_time_left(driver: Driver) -> None:
    driver.reports("b", replace(HALF, bytes_per_second=0.0))
    assert driver.core.heals(driver.now)[0].seconds_left is None


def test_a_lighthouse_that_takes_over_in_the_middle_knows_since_when(driver: Driver) -> None:
    driver.reports("b", HALF)
    assert driver.core.heals(driver.now)[0].began_seconds_ago == 2.0


def test_its_beginning_and_its_end_are_events_and_nothing_between(driver: Driver) -> None:
    assert logged(driver.reports("b", BEGUN)) == [("heal_began", "b")]
    assert driver.log[-1].detail == {"step": 7, "source": "a"}
    for _ in range(3):
        assert not driver.reports("b", HALF)
    assert logged(driver.reports("b", HEALED)) == [("healed", "b")]
    assert driver.log[-1].detail == {
        "step": 7,
        "source": "a",
        "via": "direct",
        "bytes": 100 * MIB,
        "seconds": 4.0,
        "bytes_per_second": 25 * MIB,
    }


def test_a_heal_that_has_ended_is_gone_and_its_group_still_waited_for_as_one_that_heals(driver: Driver) -> None:
    driver.reports("b", HEALED)
    assert driver.core.heals(driver.now) == ()
    assert states(driver)["b"] is ReplicaState.TRAINING
    assert not driver.reports("b", HALF), "whatever comes late"
    driver.asks("a", 1)
    assert driver.core.reason(driver.now).code == "healing"
    assert logged(driver.asks("b", 8)) == []
    assert logged(driver.reports("a", BEGUN)) == [("heal_began", "a")], "the next one is a heal of its own"


def test_a_heal_that_has_ended_is_not_given_up_when_its_group_is_late(driver: Driver) -> None:
    driver.reports("b", HEALED)
    driver.asks("a", 1)
    driver.passes(1000.0)
    assert [one.detail["members"] for one in driver.log if one.kind == "quorum"][-1] == ["a"]
    assert "heal_given_up" not in [one.kind for one in driver.log]
    driver.asks("b", 8)
    assert driver.core._groups.heals.failed == {}


def test_a_heal_that_fails_says_why(driver: Driver) -> None:
    driver.reports("b", BEGUN)
    driver.reports("b", FAILED)
    ((kind, detail),) = ends(driver)
    assert kind == "heal_failed"
    assert (detail["bytes"], detail["seconds"], detail["bytes_per_second"]) == (50 * MIB, 2.0, 25 * MIB)
    assert detail["reason"] == "TransferError: the source died"
    driver.asks("b", 0, failures=1)
    assert len(ends(driver)) == 1


@pytest.mark.parametrize(("failures", "kind"), [(0, "healed"), (1, "heal_failed")])
def test_of_a_group_that_does_not_say_so_the_next_request_is_the_end(driver: Driver, failures: int, kind: str) -> None:
    driver.heals("b")
    driver.asks("b", 8, failures=failures)
    ((found, detail),) = ends(driver)
    assert found == kind
    assert detail.get("reason") == ("its step was not committed" if failures else None)


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        (lambda driver: driver.fails("b"), "lost"),
        (lambda driver: (driver.closes("b"), driver.passes(1.0)), "lost"),
        (lambda driver: driver.leaves("b"), "left"),
        (lambda driver: driver.evicts("b"), "lost"),
    ],
    ids=["fails", "dies", "leaves", "is evicted"],
)
def test_the_heal_of_a_group_that_goes_has_failed(driver: Driver, end: object, kind: str) -> None:
    driver.reports("b", HALF)
    end(driver)
    assert [one.kind for one in driver.log if one.replica_id == "b"][-2:] == ["heal_failed", kind]
    assert driver.core.heals(driver.now) == ()


def test_heals_are_sorted_by_name(driver: Driver) -> None:
    for one in "ba":
        driver.heals(one)
    assert [view.replica_id for view in driver.core.heals(driver.now)] == ["a", "b"]


def test_an_impossible_rate_has_no_time_left() -> None:
    assert Healing(200, 100, 10.0).seconds_left == 0
    assert Healing(1, 2**62, 5e-324).seconds_left is None
    assert Healing(1, 2, -1.0).seconds_left is None
