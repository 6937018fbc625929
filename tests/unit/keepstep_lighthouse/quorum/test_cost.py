"""The work for a job of many groups grows as the number of groups, not as its square."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from keepstep_mesh.protocol.membership import PEER, MemberInfo, StepFailure
from tests.support.models.core_driver import Driver
from tests.support.models.operations import operations

FEW, TIMES = 20, 4
GROWTH = 1.4
"""Limit of the growth of the work per group from ``FEW`` to ``TIMES`` as many groups; a square would give 4."""
STEADY = 1750
"""Limit of the instructions for each group in a round without changes, those of the driver included. Nearly all rounds
are such: look for work that can be done on changes only, or once for all groups, before you raise it."""
INFO = MemberInfo("http://10.0.0.1:29400", layout="parameters")


def names(count: int) -> list[str]:
    return [f"r{number:03}:1" for number in range(count)]


def trained(count: int) -> Driver:
    """Groups that have committed a step."""
    driver = Driver()
    driver.validates = False
    begins(driver, count, 0, "")
    driver.all_ask(names(count), 1, driver.record.quorum_id)
    return driver


def begins(driver: Driver, count: int, step: int, lineage: int | str) -> None:
    """Each group connects, gets its welcome, and asks."""
    for replica_id in names(count):
        driver.opens(replica_id)
        driver.core.live_step(replica_id.partition(":")[0])
        driver.asks(replica_id, step, lineage, info=INFO, settings="init_sync True")


def first_quorum(count: int) -> Callable[[], object]:
    driver = Driver()
    driver.validates = False
    return lambda: begins(driver, count, 0, "")


def takeover(count: int) -> Callable[[], object]:
    driver = trained(count)
    driver.restart()
    return lambda: begins(driver, count, 2, driver.record.quorum_id)


def steady_round(count: int) -> Callable[[], object]:
    driver = trained(count)
    return lambda: driver.all_ask(names(count), 2, driver.record.quorum_id)


def retried_step(count: int) -> Callable[[], object]:
    driver = trained(count)
    quorum_id = driver.record.quorum_id

    def loses_one_and_retries() -> None:
        driver.fails("r000:1")
        for replica_id in names(count)[1:]:
            driver.asks(replica_id, 1, quorum_id, failures=1, shrink=True, retry=True)

    return loses_one_and_retries


def cut_network(count: int) -> Callable[[], object]:
    """Each group cannot reach five others on the opposite side, until half of all are parted."""
    driver, groups = trained(count), names(count)

    def four_rounds() -> None:
        for _ in range(4):
            driver.now += 1
            quorum_id = driver.record.quorum_id
            for number, replica_id in enumerate(groups):
                peers = tuple(groups[(number + count // 2 + step) % count] for step in (-2, -1, 0, 1, 2))
                failure = StepFailure(quorum_id, PEER, peers, "unreachable")
                driver.asks(replica_id, 1, 1, failures=1, failure=failure)
        assert sum(one.kind == "parted" for one in driver.log) >= count // 3

    return four_rounds


@pytest.mark.parametrize("scene", [first_quorum, takeover, steady_round, retried_step, cut_network])
def test_the_work_for_a_group_does_not_grow_with_the_number_of_groups(scene) -> None:
    few, many = (operations(scene(count)) / count for count in (FEW, FEW * TIMES))
    assert many < GROWTH * few, (
        f"{few:.0f} instructions for each of {FEW} groups, {many:.0f} with {TIMES} times as many"
    )


def test_a_round_without_changes_stays_cheap() -> None:
    work = operations(steady_round(FEW)) / FEW
    assert work < STEADY, f"{work:.0f} instructions for each group"
