"""Stable names of replica groups: any printable text, colons included, and one rule that finds them."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.group.group_link import LinkSettings
from keepstep_chaos.histories.jobs import _names as ordered_for
from keepstep_mesh.protocol.names import MAX_GROUP_NAME, MAX_REPLICA_ID, group_name_problem, name_of
from keepstep_mesh.protocol.telemetry_records import read_batch
from keepstep_metrics.history.events import Event
from keepstep_metrics.history.machine import MetricsCore
from tests.support.models.core_driver import Driver
from tests.support.services.metrics_driver import JOB, Teller, event

GROUPS = ("a", "a:0", "a:1", "a:0:b", ":", "a b", "a:")
"""None is another's incarnation, though some look like it."""
INCARNATIONS = {name: f"{name}:{uuid.uuid5(uuid.NAMESPACE_OID, name)}" for name in GROUPS}


class World:
    """A metrics core and the lighthouse that tells it of events."""

    def __init__(self) -> None:
        self.core, self._lighthouse = MetricsCore(), Teller()

    def happens(self, t: float, kind: str, whom: str, **detail: Any) -> None:
        self.core.apply(read_batch(self._lighthouse.batch(event(t, kind, whom, **detail))), t)

    @property
    def events(self) -> list[Event]:
        return [*self.core.jobs[JOB].events]

    @property
    def groups(self) -> list[str]:
        return sorted(self.core.jobs[JOB].groups)


printable = st.text(st.characters(exclude_categories=("C", "Z")) | st.sampled_from(" ::/%.-"), min_size=1, max_size=40)


@given(printable)
def test_every_valid_name_comes_back_from_its_incarnations(name: str) -> None:
    assert group_name_problem(name) is None
    incarnation = f"{name}:{uuid.uuid4()}"
    assert len(incarnation) <= MAX_REPLICA_ID
    assert name_of(incarnation) == name


@given(st.lists(printable, unique=True, min_size=2, max_size=8))
def test_different_names_stay_different_groups_in_the_lighthouse_and_in_the_metrics_service(names: list[str]) -> None:
    incarnations = sorted(f"{name}:{uuid.uuid4()}" for name in names)
    driver, world = Driver(min_replicas=1), World()
    driver.open_all(*incarnations)
    assert sorted(one.name for one in driver.core.replicas(driver.now)) == sorted(names)
    for one in incarnations:
        world.happens(0, "joined", one, member=False)
    assert world.groups == sorted(names)
    assert sorted({event.name for event in world.events}) == sorted(names)


def test_a_ban_and_its_readmission_reach_the_group_of_that_name_and_no_other() -> None:
    for banned in GROUPS:
        driver = Driver(min_replicas=1)
        driver.open_all(*INCARNATIONS.values())
        driver.evicts(banned, ban_seconds=60)
        out = {name for name, one in INCARNATIONS.items() if one not in driver.session_of}
        assert out == {banned}
        for other in GROUPS:
            if other != banned:
                assert driver.readmits(other) == [], (banned, other)
        assert [ban.target for ban in driver.record.bans] == [banned]
        driver.readmits(banned)
        assert (driver.record.bans, driver.record.evicted) == ((), ())


def test_an_order_for_a_name_with_a_colon_is_told_of_that_group() -> None:
    world = World()
    for one in INCARNATIONS.values():
        world.happens(0, "joined", one, member=False)
    for order in ("evicted", "readmitted"):
        world.happens(1, order, "a:0", reason="bad disk", by="ann", incarnations=[INCARNATIONS["a:0"]])
        assert world.events[-1].name == "a:0"
        assert world.events[-1].sentence.startswith(f"ann {order} a:0")
    world.happens(2, "evicted", INCARNATIONS["a:0"], reason="bad disk", by="ann")
    assert world.events[-1].name == "a:0"
    assert world.groups == sorted(GROUPS)


def test_a_history_matches_an_order_with_the_group_of_that_name() -> None:
    for target in GROUPS:
        assert [name for name, one in INCARNATIONS.items() if ordered_for(target, one)] == [target]


@pytest.mark.parametrize("name", ["r\n0", "\x1b[2J", "r" * (MAX_GROUP_NAME + 1)])
def test_a_name_that_the_lighthouse_would_refuse_is_refused_before_it_is_asked(name: str) -> None:
    options = {"store_addr": None, "store_port": None, "port": None, "hostname": "127.0.0.1", "rank": 0}
    times = {"heartbeat_interval": 0.1, "connect_timeout": 1.0, "quorum_retries": 0}
    with pytest.raises(ValueError, match=r"invalid name of a replica group .*: expected 1 to 219 printable characters"):
        LinkSettings.from_arguments(lighthouse_addr="127.0.0.1:1", replica_id=name, world_size=1, **options, **times)
