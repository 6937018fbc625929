"""Losses that count as failures: those that an operator did not order, of groups that had trained."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from keepstep_mesh.protocol.membership import FinalState
from tests.support.models.core_driver import Driver


def trained(*groups: str) -> Driver:
    driver = Driver(min_replicas=1)
    driver.start(*groups)
    return driver


def failures(driver: Driver) -> int:
    return driver.core.tally.failures


LOSSES: tuple[Callable[[Driver], object], ...] = (
    lambda driver: driver.fails("b:1"),
    lambda driver: (driver.closes("b:1"), driver.passes(1.0)),
    lambda driver: driver.passes(6.0, silent=("b:1",)),
    lambda driver: driver.leaves("b:1", "a ValueError", cause="failed"),
)


@pytest.mark.parametrize("loses", LOSSES)
def test_the_loss_of_a_group_that_trained_is_a_failure(loses: Callable[[Driver], object]) -> None:
    driver = trained("a:1", "b:1")
    loses(driver)
    assert failures(driver) == 1


def test_so_is_that_of_its_next_incarnation_before_its_first_quorum() -> None:
    driver = trained("a:1", "b:1")
    driver.fails("b:1")
    driver.opens("b:2")
    driver.fails("b:2")
    assert failures(driver) == 2


def test_a_group_that_was_in_no_quorum_is_no_failure() -> None:
    driver = trained("a:1", "b:1")
    driver.opens("c:1")
    driver.fails("c:1")
    driver.opens("c:2")
    driver.leaves("c:2", "a ValueError", cause="failed")
    assert failures(driver) == 0


ORDERS: tuple[Callable[[Driver], object], ...] = (
    lambda driver: driver.evicts("b"),
    lambda driver: driver.evicts("b:1", 60.0),
    lambda driver: (driver.drains("b"), driver.fails("b:1")),
    lambda driver: (driver.drains("b"), driver.leaves("b:1", "a ValueError", cause="failed")),
    lambda driver: driver.leaves("b:1", "SIGTERM", cause="stopped"),
    lambda driver: driver.moves("b:1"),
)


@pytest.mark.parametrize("orders", ORDERS)
def test_a_group_that_was_told_to_leave_is_no_failure(orders: Callable[[Driver], object]) -> None:
    driver = trained("a:1", "b:1")
    orders(driver)
    assert failures(driver) == 0


def test_a_group_that_ends_after_the_job_is_no_failure() -> None:
    driver = trained("a:1", "b:1")
    for one in ("a:1", "b:1"):
        driver.asks(one, 1, 1, final=True)
    assert isinstance(driver.record.closed, FinalState)
    driver.fails("b:1")
    assert failures(driver) == 0


def test_a_member_that_does_not_come_back_to_the_next_lighthouse_is_a_failure_unless_it_was_evicted() -> None:
    driver = trained("a:1", "b:1", "c:1")
    driver.restart()
    driver.opens("a:1")
    driver.evicts("c")
    driver.passes(10.0)
    assert failures(driver) == 1
