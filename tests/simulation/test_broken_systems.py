"""The simulation finds a system that breaks a rule of its design: by its logs alone, or by what it sees itself."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

import pytest

from keepstep.group.quorum_plan import QuorumPlan, make_plan
from keepstep_chaos.histories.rules import RULES
from keepstep_lighthouse.jobs.job import Job
from keepstep_lighthouse.leadership.term import Term
from keepstep_lighthouse.quorum.job_record import JobRecord
from keepstep_lighthouse.store.contract import Store, Write
from keepstep_mesh.protocol import lineage
from keepstep_mesh.protocol.membership import Member
from keepstep_mesh.protocol.messages import Quorum
from tests.simulation.actors import worker
from tests.simulation.run import violation
from tests.simulation.simulation import Simulation

SEEDS = 60


def seed_that_breaks(rules: Collection[str], seeds: int = SEEDS) -> int | None:
    """The first seed whose logs break one of ``rules``, if any. The other checks, which see more, are off."""
    for seed in range(seeds):
        simulation = Simulation(seed, lighthouses=1)
        simulation.raises = False
        simulation.run()
        if not simulation.logs.report().counts.keys().isdisjoint(rules):
            return seed
    return None


def plan_with(reference: Callable[[Member], object]) -> Callable[..., QuorumPlan]:
    """A plan whose cohort are the members for which ``reference`` is highest."""

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
    assert seed_that_breaks(RULES) is None


def test_weights_that_differ_at_an_equal_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "make_plan", plan_with(lambda one: one.step))
    assert seed_that_breaks({"one_state"}) is not None


def test_a_quorum_that_goes_back_to_the_lowest_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "make_plan", plan_with(lambda one: (-one.step, str(one.lineage))))
    assert seed_that_breaks({"one_quorum"}) is not None


def test_an_epoch_that_is_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    async def begin(cls: type[Term], store: Store) -> Term:
        await store.transact((), (Write("epoch", b"1"),))
        return cls(store, 1)

    monkeypatch.setattr(Term, "begin", classmethod(begin))
    assert seed_that_breaks({"one_owner"}) is not None


def test_a_quorum_that_is_announced_and_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    write = Job._write

    async def lose_some(self: Job, record: JobRecord) -> None:
        if record.quorum_id % 2:
            await write(self, record)

    monkeypatch.setattr(Job, "_write", lose_some)
    assert seed_that_breaks({"one_membership", "quorum_order"}, 6 * SEEDS) is not None


@pytest.mark.parametrize("order", ["not by resume", "by quorum_id before step"])
def test_states_in_another_order(monkeypatch: pytest.MonkeyPatch, order: str) -> None:
    worth = lineage.worth

    def another(state: lineage.State) -> tuple[int, ...]:
        soundness, resumed, step, quorum_id, live = worth(state)
        if order == "not by resume":
            return soundness, step, quorum_id, live
        return soundness, resumed, quorum_id, step, live

    monkeypatch.setattr(lineage, "worth", another)
    assert any("goes on from" in (violation(seed) or "") for seed in range(6 * SEEDS))
