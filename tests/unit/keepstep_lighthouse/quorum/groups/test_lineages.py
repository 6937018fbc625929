"""Lineages in the lighthouse: the quorum_id of a round, and the holders of an answer."""

from __future__ import annotations

import pytest

from keepstep_lighthouse.quorum.events import Tell
from keepstep_mesh.protocol.messages import RoundBroken
from tests.support.models.core_driver import Driver, announced


@pytest.mark.parametrize("lineage", ["loaded:1", "loaded:", "behind:x:1:1", "diverged:x:1", "loaded:resumed:1:1"])
def test_a_quorum_that_goes_on_from_a_state_that_begins_anew_gets_another_quorum_id(lineage: str) -> None:
    """Else its members could come to a (step, quorum_id) again that they had with other weights."""
    driver = Driver(min_replicas=1)
    driver.start("a", "b")
    assert announced(driver.all_ask("ab", 1, 1)).quorum_id == 1
    anew = announced(driver.all_ask("ab", 1, lineage))
    assert anew.quorum_id == 2
    assert anew.uniform, "and that is all"
    after = announced(driver.all_ask("ab", 2, "resumed:2:2"))
    assert (after.quorum_id, after.lineage) == (2, "resumed:2:2")


def test_a_member_that_heals_from_another_changes_no_quorum_id() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a", "b")
    driver.asks("a", 1, 1)
    announce = announced(driver.asks("b", 1, "behind:b:1"))
    assert (announce.quorum_id, announce.step, announce.lineage) == (1, 1, 1)
    driver.asks("a", 2, 1)
    announce = announced(driver.asks("b", 1, "loaded:1"))
    assert (announce.quorum_id, announce.step, announce.lineage) == (1, 2, 1)


def test_quorum_id_grows_beyond_the_lineages_of_a_resumed_job_too() -> None:
    driver = Driver(min_replicas=1)
    driver.open_all("a", "b")
    driver.asks("a", 5, "resumed:30:synchronized:40")
    assert announced(driver.asks("b", 5, 7)).quorum_id == 41


def test_the_job_goes_on_from_the_last_resume_and_a_member_may_go_back() -> None:
    driver = Driver(min_replicas=1)
    driver.open_all("a", "b")
    driver.asks("a", 401, "resumed:121:121")
    announce = announced(driver.asks("b", 500, 120))
    assert (announce.step, announce.lineage, announce.uniform) == (401, "resumed:121:121", False)


def broken(driver: Driver, replica_id: str, step: int, lineage: int | str) -> bool:
    """Whether the others of its round get ``RoundBroken`` when it asks on a new connection."""
    driver.closes(replica_id)
    driver.opens(replica_id)
    told = [one for one in driver.asks(replica_id, step, lineage) if isinstance(one, Tell)]
    return any(isinstance(one.message, RoundBroken) for one in told)


def test_a_member_above_the_step_of_an_answer_that_it_never_had_leaves_nobody_waiting() -> None:
    driver = Driver(min_replicas=1)
    driver.open_all("a", "b")
    driver.asks("a", 401, "resumed:121:121")
    announced(driver.asks("b", 500, 120))
    assert broken(driver, "b", 500, 120)


def test_a_member_that_committed_behind_is_not_taken_for_one_that_had_no_answer() -> None:
    driver = Driver(min_replicas=1)
    driver.open_all("a", "b")
    driver.asks("a", 7, 5)
    announced(driver.asks("b", 4, "behind:b:1"))
    assert not broken(driver, "b", 5, "behind:b:1"), "a may be at work on that step still"
