"""One incarnation of a name counts, and only groups with the job's parameters do."""

from __future__ import annotations

from keepstep_lighthouse.quorum.views import ReplicaState
from keepstep_mesh.protocol.membership import MemberInfo
from keepstep_mesh.protocol.messages import Denied
from tests.support.models.core_driver import Driver, announced, announces, members, told


def test_the_older_incarnation_of_a_name_wins_while_it_is_healthy() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a:1")
    driver.opens("a:2")
    driver.asks("a:2")
    view = next(view for view in driver.core.replicas(driver.now) if view.replica_id == "a:2")
    assert view.state is ReplicaState.KEPT_OUT
    assert view.reason is not None
    assert view.reason.code == "duplicate_name"
    assert members(announced(driver.asks("a:1", 1))) == ["a:1"]
    assert members(announced(driver.leaves("a:1"))) == ["a:2"], "its open request counts from then on"


def test_of_three_incarnations_the_oldest_left_counts() -> None:
    driver = Driver(min_replicas=1)
    driver.open_all("a:1", "a:2", "a:3")
    driver.asks("a:3")
    driver.leaves("a:1")
    driver.leaves("a:3")
    assert members(announced(driver.asks("a:2"))) == ["a:2"]


def test_after_a_restart_the_member_wins_although_it_comes_back_later() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a:1", "b:1")
    driver.restart()
    driver.opens("a:2")
    driver.asks("a:2")
    driver.opens("a:1")
    driver.opens("b:1")
    assert members(announced(driver.all_ask(["a:1", "b:1"], 1))) == ["a:1", "b:1"]


def layout(text: str) -> MemberInfo:
    return MemberInfo(f"http://{text}", layout=text)


def test_a_group_with_other_parameters_is_denied_and_nobody_waits_for_it() -> None:
    driver = Driver(min_replicas=1)
    driver.open_all("a", "b")
    driver.asks("a", info=layout("x"))
    decisions = driver.asks("b", info=layout("y"))
    (message,) = told(driver, decisions)["b"]
    assert isinstance(message, Denied)
    assert (message.code, message.peer_address) == ("layout", "http://x")
    assert members(announced(decisions)) == ["a"]
    assert members(announced(driver.asks("a", 1))) == ["a"]
    driver.asks("b", info=layout("x"))
    assert members(announced(driver.asks("a", 2))) == ["a", "b"]


def test_the_layout_of_a_member_beats_that_of_who_asked_first_after_a_restart() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a", "b")
    driver.restart()
    driver.opens("z")
    driver.asks("z", info=layout("wrong"))
    driver.open_all("a", "b")
    assert "z" in told(driver, driver.asks("a", 1, info=layout("right")))
    assert members(announced(driver.asks("b", 1, info=layout("right")))) == ["a", "b"]


def test_a_lone_group_may_change_its_layout_and_the_job_is_free_when_all_are_gone() -> None:
    driver = Driver(min_replicas=1)
    driver.opens("a")
    driver.asks("a", info=layout("x"))
    assert announces(driver.asks("a", 1, info=layout("y")))
    driver.leaves("a")
    driver.opens("b")
    assert announces(driver.asks("b", info=layout("z")))


def test_an_unknown_layout_fits_all() -> None:
    driver = Driver(min_replicas=2)
    driver.open_all("a", "b")
    driver.asks("a", info=layout("x"))
    assert announces(driver.asks("b"))
