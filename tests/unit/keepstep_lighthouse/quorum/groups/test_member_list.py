"""The quorum id, the member list that is announced, and the list's version."""

from __future__ import annotations

from keepstep_lighthouse.quorum.events import Persist
from keepstep_mesh.protocol.membership import MemberInfo
from keepstep_mesh.protocol.policy import Policy
from tests.support.models.core_driver import Driver, announced


def test_quorum_id_goes_on_growing_after_a_restart() -> None:
    driver = Driver(min_replicas=1)
    assert driver.start("a", "b").quorum_id == 1
    driver.restart()
    driver.open_all("a", "b")
    assert announced(driver.all_ask("ab", 0, failures=1)).quorum_id == 2
    driver.restart()
    driver.open_all("a")
    driver.passes(5)
    assert announced(driver.asks("a", 1, failures=1)).quorum_id == 3


def test_quorum_id_goes_on_growing_after_the_store_was_lost() -> None:
    driver = Driver(min_replicas=1)
    decisions = driver.opens("a", seen=41)
    assert decisions[0] == Persist(driver.record), "written before anything else"
    assert driver.record.quorum_id == 41
    driver.asks("a", 7, 41)
    assert announced(driver.passes(5)).quorum_id == 42


def test_an_unchanged_quorum_is_neither_written_nor_listed_again() -> None:
    driver = Driver(min_replicas=1)
    first = driver.start("a", "b")
    for step in range(1, 5):
        decisions = driver.all_ask("ab", step, 1)
        again = announced(decisions)
        assert decisions == [again], "nothing but the answer: no write, no log"
        assert (again.quorum_id, again.version) == (first.quorum_id, first.version)
        assert again.uniform
        assert (again.step, again.lineage) == (step, 1)


def test_groups_at_an_equal_step_with_different_weights_are_told_apart_by_their_lineage() -> None:
    driver = Driver(min_replicas=1)
    driver.open_all("a", "b", "c")
    driver.asks("a", 5, 3)
    driver.asks("b", 5, 4)
    announce = announced(driver.asks("c", 5, 3))
    assert not announce.uniform, "everybody gets the list, and sees who has to heal"
    assert (announce.step, announce.lineage) == (5, 4), "the later commit counts, not the greater number"


def test_a_changed_info_makes_a_new_list() -> None:
    driver = Driver(min_replicas=1)
    first = driver.start("a", "b")
    driver.asks("a", 1, info=MemberInfo("http://new"))
    again = announced(driver.asks("b", 1))
    assert again.version > first.version
    assert again.quorum_id == first.quorum_id
    assert again.members[0].info.address == "http://new"
    assert again.members[0].step == 1


def test_a_list_with_differing_facts_is_new_each_time_and_so_is_the_first_common_one() -> None:
    driver = Driver(min_replicas=1)
    versions = [driver.start("a", "b").version]
    for steps in ((1, 1), (2, 1), (2, 1), (3, 3), (4, 4)):
        driver.asks("a", steps[0])
        announce = announced(driver.asks("b", steps[1]))
        assert announce.uniform == (steps[0] == steps[1])
        versions.append(announce.version)
    assert versions == [1, 1, 2, 3, 4, 4]


def test_a_group_that_needs_the_list_later_gets_that_of_its_round() -> None:
    driver = Driver(min_replicas=1)
    first = driver.start("a", "b")
    driver.all_ask("ab", 1, 1)
    driver.asks("a", 2, 1)
    announce = announced(driver.asks("b", 2, 1, request=3))
    assert announce.version == first.version
    assert [(member.step, member.lineage) for member in announce.members] == [(2, 1), (2, 1)]
    driver.closes("b")
    driver.opens("b")
    again = announced(driver.asks("b", 2, 1, request=3))
    assert again.members == announce.members


def test_a_failed_commit_and_shrink_only_are_facts_of_the_list() -> None:
    driver = Driver(min_replicas=1)
    driver.start("a")
    failed = announced(driver.asks("a", failures=2))
    assert not failed.uniform
    assert failed.members[0].commit_failures == 2
    shrinking = announced(driver.asks("a", shrink=True))
    assert not shrinking.uniform
    assert shrinking.members[0].shrink_only
    assert announced(driver.asks("a")).uniform


def test_the_reference_state_of_a_mixed_list_is_the_furthest() -> None:
    driver = Driver(min_replicas=1)
    driver.open_all("a", "b", "c")
    driver.asks("a", 5, 3)
    driver.asks("b", 5, 4)
    announce = announced(driver.asks("c", 2, 9))
    assert (announce.step, announce.lineage) == (5, 4)


def test_joiners_are_those_that_could_come_in() -> None:
    driver = Driver(policy=Policy(1, max_replicas=3))
    driver.start("a:1", "b:1")
    driver.open_all("c:1", "d:1", "a:2")
    assert announced(driver.all_ask(["a:1", "b:1"], 1)).joiners == 1, (
        "two wait, one has room, a namesake does not count"
    )
