"""Spares: who is let in, and in whose place. ``tests/scenarios/45_spares.txt`` and the next two show the rules."""

from __future__ import annotations

import pytest

from keepstep_lighthouse.jobs import records
from keepstep_lighthouse.quorum.views.replicas import ReplicaState
from keepstep_mesh.protocol.messages import Denied, Drain
from keepstep_mesh.protocol.policy import Policy
from tests.support.models.core_driver import Driver, announced, announces, logged, members, states, told


def job_of(groups: int, spares: int, **policy: int) -> Driver:
    """A job whose groups ``r0``, ``r1`` ... train, and whose spares ask."""
    driver = Driver(Policy(**policy))
    names = [f"r{number}:1" for number in range(groups + spares)]
    for name in names:
        driver.opens(name, standby=True, groups=groups)
    for name in names[:groups]:
        decisions = driver.asks(name)
    assert members(announced(decisions)) == names[:groups]
    for name in names[groups:]:
        assert not announces(driver.asks(name))
    return driver


def test_a_spare_that_has_not_asked_is_not_let_in() -> None:
    driver = job_of(2, 0)
    driver.opens("r2:1", standby=True, groups=2)
    driver.fails("r0:1")
    assert members(announced(driver.asks("r1:1", 1, 1, failures=1))) == ["r1:1"]
    driver.asks("r2:1")
    assert members(announced(driver.asks("r1:1", 2, 2))) == ["r1:1", "r2:1"]


def test_the_spare_with_the_newest_state_is_let_in_first() -> None:
    driver = job_of(2, 0)
    for name, step in (("r2:1", 0), ("r3:1", 40), ("r4:1", 30)):
        driver.opens(name, standby=True, groups=2)
        driver.asks(name, step, f"loaded:{step}" if step else "new:r2:1")
    driver.fails("r0:1")
    assert states(driver)["r3:1"] is ReplicaState.ASKING


def test_every_lost_group_is_replaced_by_one_spare() -> None:
    driver = job_of(4, 3)
    driver.fails("r0:1")
    driver.fails("r1:1")
    driver.asks("r2:1", 1, 1, failures=1)
    assert members(announced(driver.asks("r3:1", 1, 1, failures=1))) == ["r2:1", "r3:1", "r4:1", "r5:1"]


def test_a_spare_is_let_in_when_a_group_is_lost_and_not_while_it_may_reconnect() -> None:
    driver = job_of(2, 1)
    driver.closes("r0:1")
    assert states(driver)["r2:1"] is ReplicaState.SPARE
    driver.opens("r0:1")
    driver.passes(1.0)
    assert states(driver)["r2:1"] is ReplicaState.SPARE


def test_the_restarted_process_of_a_name_stands_by_also_when_it_came_before_the_old_one_was_lost() -> None:
    driver = job_of(2, 1)
    driver.closes("r0:1")
    driver.opens("r0:2", standby=True, groups=2)
    driver.asks("r0:2")
    driver.passes(0.3)
    assert states(driver)["r2:1"] is ReplicaState.ASKING
    assert states(driver)["r0:2"] is ReplicaState.SPARE
    assert members(announced(driver.asks("r1:1", 1, 1, failures=1))) == ["r1:1", "r2:1"]


def test_a_job_whose_groups_are_restarted_one_by_one_with_a_lower_number_keeps_its_spare() -> None:
    driver = job_of(3, 0)
    driver.leaves("r2:1", "SIGTERM", cause="drained", step=1)
    for leaves, comes, stays in (("r0:1", "r0:2", "r1:1"), ("r1:1", "r1:2", "r0:2")):
        driver.leaves(leaves, "SIGTERM", cause="stopped", step=1)
        driver.opens(comes, standby=True, groups=2)
        driver.asks(comes)
        assert members(announced(driver.asks(stays, 1, 1))) == sorted((comes, stays))
    driver.opens("s:1", standby=True, groups=2)
    driver.asks("s:1")
    assert states(driver)["s:1"] is ReplicaState.SPARE


def test_a_group_that_counts_the_spares_as_groups_is_refused_and_lets_no_spare_in() -> None:
    driver = Driver(Policy())
    for name in ("r0:1", "r1:1", "r2:1"):
        driver.opens(name, standby=True, groups=2)
    driver.opens("r3:1", groups=3)
    driver.asks("r3:1", settings="KEEPSTEP_SPARES 0")
    driver.asks("r0:1", settings="KEEPSTEP_SPARES 1")
    assert members(announced(driver.asks("r1:1", settings="KEEPSTEP_SPARES 1"))) == ["r0:1", "r1:1"]
    driver.asks("r2:1", settings="KEEPSTEP_SPARES 1")
    assert states(driver)["r2:1"] is ReplicaState.SPARE
    driver.opens("r4:1", groups=3)
    (denied,) = told(driver, driver.asks("r4:1", settings="KEEPSTEP_SPARES 0"))["r4:1"]
    assert isinstance(denied, Denied)
    assert "setting KEEPSTEP_SPARES: 0 in r4, 1 in r0" in denied.reason
    assert states(driver)["r2:1"] is ReplicaState.SPARE


def test_a_spare_whose_settings_differ_is_refused_before_it_is_needed() -> None:
    driver = Driver(Policy())
    for name in ("r0:1", "r1:1", "r2:1"):
        driver.opens(name, standby=True, groups=2)
    driver.asks("r0:1", settings="a 1")
    driver.asks("r1:1", settings="a 1")
    (denied,) = told(driver, driver.asks("r2:1", settings="a 2"))["r2:1"]
    assert isinstance(denied, Denied)
    assert denied.code == "layout"


def test_max_replicas_limits_the_groups_that_spares_complete() -> None:
    driver = job_of(3, 1, max_replicas=3)
    driver.sets_policy(Policy(max_replicas=2))
    driver.fails("r0:1")
    assert states(driver)["r3:1"] is ReplicaState.SPARE


def test_two_orders_and_one_spare_replace_one_group() -> None:
    driver = job_of(2, 1)
    driver.replaces("r0")
    driver.replaces("r1")
    assert [one.replica_id for one in driver.record.replacing] == ["r0:1", "r1:1"]
    assert records.decode("jobs/job", records.encode(driver.record)) == driver.record
    driver.all_ask(("r0:1", "r1:1"), 1, 1)
    driver.all_ask(("r0:1", "r1:1"), 2, 2)
    decisions = driver.asks("r2:1", 2, 2)
    assert {name: one for name, one in told(driver, decisions).items() if isinstance(one[0], Drain)}.keys() == {"r0:1"}
    driver.leaves("r0:1")
    for step in (3, 4, 5):
        driver.all_ask(("r1:1", "r2:1"), step, 3)
    assert [one.replica_id for one in driver.record.replacing] == ["r1:1"], "it waits for the next spare"
    assert not driver.core.replicas(driver.now)[1].draining


def test_a_group_is_not_drained_for_a_spare_that_has_not_healed() -> None:
    driver = job_of(2, 1)
    driver.replaces("r1")
    driver.all_ask(("r0:1", "r1:1"), 1, 1)
    for step in (2, 3):
        driver.all_ask(("r0:1", "r1:1"), step, 2)
        assert not told(driver, driver.asks("r2:1", step, "follows:2"))
    driver.all_ask(("r0:1", "r1:1"), 4, 2)
    assert isinstance(told(driver, driver.asks("r2:1", 4, 2))["r1:1"][0], Drain)


def test_a_group_with_an_order_that_stands_by_after_a_change_of_leader_leaves_at_once() -> None:
    driver = job_of(2, 1)
    driver.replaces("r1")
    driver.replaces("r2")
    driver.restart()
    for name in ("r2:1", "r0:1", "r1:1"):
        decisions = driver.opens(name, standby=True, groups=2)
    assert isinstance(told(driver, decisions)["r2:1"][0], Drain)
    driver.leaves("r2:1")
    assert [one.replica_id for one in driver.record.replacing] == ["r1:1"]


def test_a_replaced_group_that_is_lost_needs_no_second_spare() -> None:
    driver = job_of(2, 2)
    driver.replaces("r1")
    assert states(driver)["r2:1"] is ReplicaState.ASKING
    driver.fails("r1:1")
    assert not driver.record.replacing
    assert states(driver)["r3:1"] is ReplicaState.SPARE


def test_a_lost_spare_of_a_replacement_is_replaced_by_the_next() -> None:
    driver = job_of(2, 2)
    driver.replaces("r1")
    driver.fails("r2:1")
    assert states(driver)["r3:1"] is ReplicaState.ASKING
    assert driver.record.replacing


def test_all_groups_are_lost_and_a_spare_trains_on() -> None:
    driver = job_of(2, 1)
    driver.fails("r0:1")
    assert members(announced(driver.fails("r1:1"))) == ["r2:1"]


def test_spares_of_a_job_that_finished_once_train_when_it_is_started_again() -> None:
    driver = job_of(1, 1)
    driver.leaves("r0:1", "shutdown", cause="finished", step=5)
    driver.leaves("r1:1")
    assert driver.record.ended is not None
    driver.opens("r0:2", standby=True, groups=1)
    assert members(announced(driver.asks("r0:2", 5, "loaded:1"))) == ["r0:2"]


def test_a_group_that_is_restarted_trains_although_the_spares_were_sent_home() -> None:
    driver = job_of(1, 1)
    decisions = driver.leaves("r0:1", "SIGTERM", cause="stopped", step=2)
    assert any(isinstance(one, Drain) for one in told(driver, decisions)["r1:1"])
    driver.opens("r0:2", standby=True, groups=1)
    assert members(announced(driver.asks("r0:2"))) == ["r0:2"]


def test_a_job_that_is_started_again_with_fewer_groups_has_a_spare() -> None:
    driver = job_of(3, 0)
    for name in ("r0:1", "r1:1", "r2:1"):
        driver.leaves(name, "SIGTERM", cause="stopped", step=5)
    for name in ("r0:2", "r1:2"):
        driver.opens(name, standby=True, groups=1)
        driver.asks(name, 5, "loaded:1")
    assert states(driver)["r1:2"] is ReplicaState.SPARE


def test_a_group_that_leaves_before_the_first_quorum_ends_no_job() -> None:
    driver = Driver(Policy())
    for name in ("r0:1", "r1:1", "r2:1"):
        driver.opens(name, standby=True, groups=2)
    driver.asks("r0:1")
    driver.leaves("r2:1", "SIGTERM", cause="stopped", step=0)
    assert members(announced(driver.asks("r1:1"))) == ["r0:1", "r1:1"]


def test_the_only_group_of_a_job_without_room_for_a_spare_is_not_replaced() -> None:
    driver = job_of(1, 1, max_replicas=1)
    why = "max_replicas 1 has no room for a spare beside r0:1; raise it (keepstep policy)"
    assert driver.core.irreplaceable("r0") == why, "the spare would leave with the group, and the job would end"


def test_an_order_is_dropped_when_the_policy_leaves_no_room_for_a_spare() -> None:
    driver = job_of(1, 1)
    driver.replaces("r0")
    decisions = driver.sets_policy(Policy(max_replicas=1))
    assert ("not_replaced", "r0:1") in logged(decisions)
    assert not driver.record.replacing
    for step in (1, 2):
        assert "r0:1" not in told(driver, driver.asks("r0:1", step, step)), "it is not drained: the job would end"


def test_a_spare_that_is_drained_is_not_let_in() -> None:
    driver = job_of(2, 1)
    driver.drains("r2")
    driver.fails("r0:1")
    assert states(driver)["r2:1"] is ReplicaState.SPARE


def test_an_order_for_a_group_that_left_before_a_takeover_is_dropped_with_a_policy_without_room() -> None:
    driver = job_of(2, 1)
    driver.replaces("r0")
    driver.restart()
    driver.sets_policy(Policy(max_replicas=1))  # during the grace of the takeover
    driver.opens("r1:1", standby=True, groups=2)
    driver.passes(60.0)
    decisions = driver.asks("r1:1", 1, 1)
    assert not driver.record.replacing
    assert "not_replaced" not in [kind for kind, _ in logged(decisions)], "it has left already"


def test_a_group_is_not_drained_while_another_one_still_has_weights_of_a_history_that_the_job_has_left() -> None:
    driver = job_of(3, 0)
    driver.all_ask(("r0:1", "r1:1", "r2:1"), 1, 1)
    driver.opens("r3:1", standby=True, groups=3)
    driver.asks("r3:1", 9, "loaded:9")
    driver.replaces("r2")
    driver.asks("r0:1", 9, "loaded:9")
    assert announced(driver.all_ask(("r1:1", "r2:1"), 2, 1)).step == 9
    for name in ("r0:1", "r2:1", "r3:1"):
        assert "r2:1" not in told(driver, driver.asks(name, 10, "resumed:10:10")), "r1 heals"
    assert isinstance(told(driver, driver.asks("r1:1", 10, "resumed:10:10"))["r2:1"][0], Drain)


def test_a_group_is_not_drained_for_a_spare_that_holds_the_state_of_the_job_and_has_committed_no_step() -> None:
    driver = job_of(2, 0)
    driver.opens("r2:1", standby=True, groups=2)
    driver.asks("r2:1", 9, "loaded:9")
    driver.replaces("r1")
    driver.asks("r0:1", 9, "loaded:9")
    assert announced(driver.asks("r1:1", 1, 1)).lineage == "loaded:9"
    assert not told(driver, driver.asks("r0:1", 10, "resumed:10:10"))
    assert isinstance(told(driver, driver.asks("r2:1", 10, "resumed:10:10"))["r1:1"][0], Drain)


@pytest.mark.parametrize("checkpoint", [1, 6])
def test_the_unused_checkpoint_of_a_spare_takes_no_steps_from_groups_that_took_part_without_healing(
    checkpoint: int,
) -> None:
    driver = job_of(2, 0)
    driver.opens("r2:1", standby=True, groups=2)
    driver.asks("r2:1", checkpoint, f"loaded:{checkpoint}")
    driver.leaves("r0:1", "told to")
    announce = announced(driver.asks("r1:1", 6, "behind:r1:1:4"))
    assert members(announce) == ["r1:1", "r2:1"]
    assert (announce.step, announce.lineage) == (6, "behind:r1:1:4")


def test_a_later_checkpoint_than_the_state_of_groups_that_took_part_without_healing_takes_them_on() -> None:
    driver = job_of(2, 0)
    driver.opens("r2:1", standby=True, groups=2)
    driver.asks("r2:1", 7, "loaded:7")
    driver.leaves("r0:1", "told to")
    announce = announced(driver.asks("r1:1", 6, "behind:r1:1:4"))
    assert (announce.step, announce.lineage) == (7, "loaded:7")
