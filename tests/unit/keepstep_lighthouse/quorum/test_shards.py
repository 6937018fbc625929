"""Shards of a model that exists once, as the lighthouse logs and shows them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from keepstep_lighthouse.quorum.events import ReplaceOrdered, ShardsReported
from keepstep_mesh.protocol.messages import Exposure, ShardReport
from tests.support.models.core_driver import Driver

A = ShardReport(1, 0, 4, 0, "fresh", 0, 0.5, 100, ("b",), formed=True)
B = replace(A, seat=1, keepers=("a",))
NO_MEMORY = (Exposure("b", "no memory"),)


@pytest.fixture
def driver() -> Driver:
    one = Driver(min_replicas=1)
    one.start("a", "b")
    return one


def reports(driver: Driver, replica_id: str, told: ShardReport) -> None:
    driver.feed(ShardsReported(driver.session_of[replica_id], told))


def logged(driver: Driver) -> list[tuple[str, str, dict[str, object]]]:
    kinds = ("world_formed", "exposed", "covered", "shards_lost")
    return [(one.kind, one.replica_id, one.detail) for one in driver.log if one.kind in kinds]


def test_a_world_is_logged_once_whichever_member_reports_first(driver: Driver) -> None:
    reports(driver, "b", B)
    reports(driver, "a", A)
    resized = replace(A, world=2, ranks=2, former_ranks=4, how="resized", step=7, seconds=0.25)
    reports(driver, "a", resized)
    reports(driver, "a", replace(resized, formed=False, copies_bytes=200))
    assert logged(driver) == [
        ("world_formed", "", {"how": "fresh", "ranks": 4, "step": 0, "seconds": 0.5}),
        ("world_formed", "", {"how": "resized", "ranks": 2, "step": 7, "former_ranks": 4, "seconds": 0.25}),
    ]


def test_a_lighthouse_that_takes_over_does_not_log_a_world_that_formed_before(driver: Driver) -> None:
    reports(driver, "a", replace(A, formed=False))
    assert logged(driver) == []


def test_steps_that_a_job_has_lost_are_logged_with_its_world(driver: Driver) -> None:
    reports(driver, "a", replace(A, how="resumed", step=5, went_back=3))
    assert logged(driver)[0][2]["went_back"] == 3


def test_lost_shards_are_an_event_of_their_own(driver: Driver) -> None:
    reports(driver, "a", replace(A, how="lost", step=9, went_back=9))
    reports(driver, "b", replace(B, how="lost", step=9, went_back=9))
    assert logged(driver) == [("shards_lost", "", {"step": 9, "went_back": 9})]


def test_a_member_is_exposed_until_its_keeper_has_its_copies(driver: Driver) -> None:
    reports(driver, "a", replace(A, exposed=NO_MEMORY))
    reports(driver, "a", replace(A, exposed=NO_MEMORY, copies_bytes=200, formed=False))
    reports(driver, "b", B)
    said = "its keeper b has no copies: no memory"
    view = driver.core.quorum_view(driver.now)
    assert view.exposed == (f"a is exposed: {said}",)
    assert view.copies_bytes == 300
    reports(driver, "a", replace(A, formed=False))
    assert logged(driver)[1:] == [("exposed", "a", {"reason": said}), ("covered", "a", {"keepers": "b"})]
    assert driver.core.quorum_view(driver.now).exposed == ()


def test_a_member_that_has_left_is_not_exposed(driver: Driver) -> None:
    reports(driver, "a", replace(A, exposed=(Exposure("", "no other member"),)))
    assert driver.core.quorum_view(driver.now).exposed == ("a is exposed: no other member",)
    driver.leaves("a")
    assert driver.core.quorum_view(driver.now).exposed == ()


def test_a_group_without_shards_is_shown_as_before(driver: Driver) -> None:
    view = driver.core.quorum_view(driver.now)
    assert (view.exposed, view.copies_bytes) == ((), 0)
    assert all(one.shards is None for one in driver.core.replicas(driver.now))


def test_an_order_to_replace_a_member_drains_it_at_once_and_a_spare_takes_its_seat() -> None:
    driver = Driver(min_replicas=1)
    for one in ("a", "b"):
        driver.opens(one, groups=2)
    driver.all_ask(("a", "b"))
    reports(driver, "a", A)
    driver.feed(ReplaceOrdered("a", "a bad disk", "ann"))
    driver.feed(ReplaceOrdered("b", "a bad disk", "ann"))
    drained = [one.replica_id for one in driver.log if one.kind == "drain"]
    assert drained == ["a"], "b has the whole model: a spare must heal from it or another before it leaves"
