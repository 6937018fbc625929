"""The event log names a group that the others waited for."""

from __future__ import annotations

from tests.support.models.core_driver import Driver


def waits(driver: Driver) -> list[tuple[str, object, object]]:
    return [
        (one.replica_id, one.detail["seconds"], one.detail["step"]) for one in driver.log if one.kind == "waited_for"
    ]


def test_a_group_that_asks_half_of_the_join_timeout_after_the_first_is_named() -> None:
    driver = Driver(min_replicas=1, join_timeout=60)
    driver.start("a", "b", "c")
    driver.asks("a", 1)
    driver.passes(10.0)
    driver.asks("b", 1)
    driver.passes(30.0)
    driver.asks("c", 1)
    assert waits(driver) == [("c", 40.0, 1)]


def test_two_groups_wait_for_each_other_longer_than_the_join_timeout() -> None:
    driver = Driver(min_replicas=2, join_timeout=10)
    driver.start("a", "b")
    driver.asks("a", 1)
    driver.passes(100.0)
    driver.asks("b", 1)
    assert waits(driver) == [("b", 100.0, 1)]


def test_groups_that_evaluate_together_start_late_or_are_a_bit_slower_are_not_named() -> None:
    driver = Driver(min_replicas=1, join_timeout=60)
    driver.open_all("a", "b", "c")
    driver.asks("a")
    driver.passes(40.0)
    driver.all_ask(["b", "c"])  # their first request
    driver.passes(100.0)  # all evaluate
    driver.asks("a", 1)
    driver.passes(29.0)
    driver.all_ask(["b", "c"], 1)
    assert waits(driver) == []


def test_a_job_whose_group_hangs_stands_all_the_time_although_the_requests_of_the_others_time_out() -> None:
    driver = Driver(min_replicas=1, join_timeout=600.0)
    driver.start("a", "b", "c")
    driver.all_ask("abc", 1, 1)
    driver.asks("a", 2, 1, timeout=20.0)
    begun = driver.unix
    codes = []
    for _ in range(10):
        driver.passes(10.0)
        status = driver.core.status(driver.now, driver.unix)
        codes.append((status.code, status.since))
        driver.passes(10.5)
        driver.asks("a", 2, 1, timeout=20.0)
    assert set(codes) == {("standing", begun)}
    driver.asks("b", 2, 1)
    driver.asks("c", 2, 1)
    assert driver.core.status(driver.now, driver.unix).code == "running"


def test_a_spare_that_waited_for_long_does_not_make_a_job_stand_when_it_is_let_in() -> None:
    driver = Driver(min_replicas=1)
    for name in ("a:1", "b:1", "c:1"):
        driver.opens(name, standby=True, groups=2)
        driver.asks(name)
    driver.passes(100.0)
    driver.all_ask(("a:1", "b:1"), 1, 1)
    driver.fails("b:1")
    assert driver.core.status(driver.now, driver.unix).code == "running"
