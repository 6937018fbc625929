"""A system that breaks a rule of its design leaves a history that shows it to who has nothing but the logs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest

from keepstep.group.quorum_plan import QuorumPlan, make_plan
from keepstep_lighthouse.quorum.events import JobRecord
from keepstep_mesh.protocol.membership import Member, Quorum
from tests.simulation import worker
from tests.simulation.history import report_on
from tests.simulation.lighthouse import Lighthouse, Store
from tests.simulation.simulator import Simulation

SEEDS = 60


def rules_broken(seeds: int = SEEDS) -> Counter[str]:
    """In how many of some simulations each rule is violated. The simulator's own checks, which see more, are off."""
    broken: Counter[str] = Counter()
    for seed in range(seeds):
        simulation = Simulation(seed)
        simulation.violated = lambda _: None  # type: ignore[method-assign]
        simulation.run()
        broken.update(set(report_on(simulation.logs.lines).counts))
    return broken


def plan_with(reference: Callable[[Member], object]) -> Callable[..., QuorumPlan]:
    """A plan whose cohort are the members of which ``reference`` says the most."""

    def plan(quorum: Quorum, replica_id: str, previous: QuorumPlan | None = None) -> QuorumPlan:
        right = make_plan(quorum, replica_id, previous)
        if quorum.uniform:
            return right
        best = max(right.members, key=lambda one: (reference(one), one.replica_id))
        cohort = tuple(i for i, one in enumerate(right.members) if reference(one) == reference(best))
        return replace(
            right,
            cohort=cohort,
            max_step=best.step,
            lineage=best.lineage,
            source=None if right.replica_rank in cohort else cohort[0],
            destinations=(),
        )

    return plan


def test_a_system_that_keeps_its_rules_breaks_none() -> None:
    assert not rules_broken()


def test_weights_that_differ_at_an_equal_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "make_plan", plan_with(lambda one: one.step))
    assert "one_state" in rules_broken()


def test_a_quorum_that_goes_back_to_the_lowest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "make_plan", plan_with(lambda one: (-one.step, str(one.lineage))))
    assert "one_quorum" in rules_broken()


def test_an_epoch_that_is_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Lighthouse.__init__

    def begin_again(self: Lighthouse, simulation: Simulation, store: Store, random: Random) -> None:
        begin(self, simulation, store, random)
        self.epoch = store.epoch = 1

    monkeypatch.setattr(Lighthouse, "__init__", begin_again)
    assert "one_owner" in rules_broken()


def test_a_quorum_that_is_announced_and_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    land = Lighthouse._land

    def lose_some(self: Lighthouse, record: JobRecord) -> None:
        if record.quorum_id % 2:
            land(self, record)

    monkeypatch.setattr(Lighthouse, "_land", lose_some)
    assert {"one_membership", "quorum_order"} & set(rules_broken(6 * SEEDS))
