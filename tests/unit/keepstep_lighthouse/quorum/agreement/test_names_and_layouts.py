"""One incarnation of a name counts, and only groups with the job's parameters do."""

from __future__ import annotations

from keepstep_lighthouse.quorum.events import Decision
from keepstep_lighthouse.quorum.views.replicas import ReplicaState
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


def denials(driver: Driver, decisions: list[Decision]) -> dict[str, Denied]:
    """Return the denials for a difference, by group."""
    messages = ((who, one) for who, several in told(driver, decisions).items() for one in several)
    return {who: one for who, one in messages if isinstance(one, Denied) and one.code == "layout"}


def test_a_group_with_other_parameters_than_a_member_is_denied_and_nobody_waits_for_it() -> None:
    driver = Driver(min_replicas=1)
    driver.opens("a")
    assert announces(driver.asks("a", info=layout("x")))
    driver.opens("b")
    decisions = driver.asks("b", info=layout("y"))
    assert denials(driver, decisions)["b"].peer_address == "http://x"
    assert not announces(decisions)
    assert members(announced(driver.asks("a", 1))) == ["a"]
    driver.asks("b", info=layout("x"))
    assert members(announced(driver.asks("a", 2))) == ["a", "b"]


def test_a_group_that_is_denied_learns_the_step_of_the_job() -> None:
    driver = Driver(min_replicas=2)
    driver.open_all("a", "b")
    for name in ("a", "b"):
        driver.asks(name, 7, info=layout("x"))
    driver.opens("c")
    assert denials(driver, driver.asks("c", info=layout("y")))["c"].peer_step == 7
    driver.asks("a", 8, final=True, info=layout("x"))
    denied = denials(driver, driver.asks("c", info=layout("y")))
    assert denied["c"].peer_step == 7, "of a group that finishes, the last step that it took"


def test_the_layout_of_a_member_beats_that_of_who_asked_first_after_a_restart() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a", "b")
    driver.restart()
    driver.opens("z")
    driver.asks("z", info=layout("wrong"))
    driver.open_all("a", "b", "y")
    driver.asks("y", info=layout("wrong"))
    driver.asks("a", 1, info=layout("right"))
    decisions = driver.asks("b", 1)
    assert members(announced(decisions)) == ["a", "b"]
    assert sorted(denials(driver, decisions)) == ["y", "z"], "one member outweighs any number of joiners"


def test_a_lone_group_may_change_its_layout_and_the_job_is_free_when_all_are_gone() -> None:
    driver = Driver(min_replicas=1)
    driver.opens("a")
    driver.asks("a", info=layout("x"))
    assert announces(driver.asks("a", 1, info=layout("y")))
    driver.leaves("a")
    driver.opens("b")
    assert announces(driver.asks("b", info=layout("z")))


def test_a_lone_member_that_changed_its_layout_decides_for_those_that_join() -> None:
    driver = Driver(min_replicas=1)
    driver.opens("a")
    driver.asks("a", info=layout("x"))
    driver.asks("a", 1, info=layout("y"))
    driver.open_all("b", "c")
    assert list(denials(driver, driver.asks("b", info=layout("x")))) == ["b"]
    driver.asks("c", info=layout("y"))
    assert members(announced(driver.asks("a", 2))) == ["a", "c"]


def test_in_the_first_quorum_the_layout_of_the_majority_counts_whoever_comes_first() -> None:
    driver = Driver(min_replicas=1, initial_replicas=4)
    driver.open_all("a", "b", "c", "d")
    driver.asks("a", info=layout("wrong"))
    driver.asks("b", info=layout("right"))
    driver.asks("c")
    decisions = driver.asks("d", info=layout("right"))
    assert members(announced(decisions)) == ["b", "c", "d"], "an unknown layout fits; a refused group counts as come"
    denied = denials(driver, decisions)
    assert list(denied) == ["a"]
    assert denied["a"].reason == "the parameters of a differ from those of b; the job follows b, d"
    assert denied["a"].peer_address == "http://right"


def test_without_a_majority_in_the_first_quorum_all_are_refused_and_each_is_shown_the_other_side() -> None:
    driver = Driver(min_replicas=2)
    driver.open_all("a", "b", "c", "d")
    driver.asks("a", info=layout("x"))
    driver.asks("b", info=layout("x"))
    driver.asks("c", info=layout("y"))
    decisions = driver.asks("d", info=layout("y"))
    assert not announces(decisions)
    denied = denials(driver, decisions)
    assert {replica_id: one.peer_address for replica_id, one in denied.items()} == {
        "a": "http://y",
        "b": "http://y",
        "c": "http://x",
        "d": "http://x",
    }
    assert all(
        "no side has a majority (a, b against c, d), so all are refused" in one.reason for one in denied.values()
    )
    driver.asks("c", info=layout("x"))
    assert announces(driver.asks("b", info=layout("x"))), "they may ask again"


def test_members_that_learn_their_layouts_after_the_first_quorum_are_compared_in_the_next() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a", "b", "c")
    driver.asks("a", 1, info=layout("wrong"))
    driver.asks("b", 1, info=layout("right"))
    decisions = driver.asks("c", 1, info=layout("right"))
    assert members(announced(decisions)) == ["b", "c"]
    assert list(denials(driver, decisions)) == ["a"]


def test_a_refused_minority_leaves_too_few_groups_for_a_quorum() -> None:
    driver = Driver(min_replicas=3)
    driver.open_all("a", "b", "c")
    driver.asks("a", info=layout("x"))
    driver.asks("b", info=layout("y"))
    decisions = driver.asks("c", info=layout("y"))
    assert not announces(decisions)
    assert list(denials(driver, decisions)) == ["a"]
    assert driver.core.reason(driver.now).code == "min_replicas"


def test_an_unknown_layout_fits_all() -> None:
    driver = Driver(min_replicas=2)
    driver.open_all("a", "b")
    driver.asks("a", info=layout("x"))
    assert announces(driver.asks("b"))
