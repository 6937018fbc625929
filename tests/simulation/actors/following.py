"""A group of the simulation that catches up: it follows steps without weights, with the real log of gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

from keepstep.group.quorum_plan import QuorumPlan
from keepstep.step.catching_up.gradient_log import FollowedStep, GradientLog, HeldState, Phase
from keepstep_mesh.protocol.lineage import followed
from keepstep_mesh.protocol.membership import Lineage

if TYPE_CHECKING:
    from tests.simulation.actors.worker import Worker

REPLAYED_AT_ONCE = 2


class Following:
    """The catch-up of one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._log: GradientLog[int] = GradientLog(1 << 30)
        self._source = ""
        self._arrived: int | None = None
        self._failed = False
        self._number = 0
        """Of the catch-up."""
        self._automatic = worker.sim.replays_unasked
        """Whether the group heals after a replay, which may give other weights than those of the others."""
        self._doubted: Lineage | None = None
        self._replayed = 0
        self.caught_up = 0
        """Number of catch-ups that ended with the weights of the others."""

    @property
    def active(self) -> bool:
        return self._log.phase is not Phase.IDLE

    @property
    def doubts(self) -> bool:
        return self._doubted is not None and self._worker.lineage == self._doubted

    def check(self, plan: QuorumPlan) -> bool:
        """Return whether the step may commit. Give up if the others took another step than this group followed."""
        if not self.active or plan.follows:
            return True
        objects = self._log.is_worth_more(HeldState(plan.max_step, plan.lineage, 0))
        self.give_up()
        return not objects

    def begin(self, plan: QuorumPlan) -> None:
        """Follow from the step of ``plan`` on."""
        worker, progress = self._worker, self._worker.progress
        assert plan.source is not None
        held = HeldState(progress.step, progress.lineage, progress.batches_committed)
        self._doubted, self._replayed = progress.fall_behind() if self._automatic else None, 0
        self._log.begin(held, HeldState(plan.max_step, plan.lineage, 0), self._doubted)
        progress.follow(plan.max_step, plan.lineage, 0)
        worker.sim.logs.step(worker, "follows", lineage=worker.lineage)
        self._number += 1
        self._arrived, self._failed, self._source = None, False, plan.members[plan.source].replica_id
        source = worker.sim.workers[self._source]
        wanted = (plan.quorum_id, plan.max_step, plan.lineage)
        state = source.snapshot[3] if source.snapshot is not None and source.snapshot[:3] == wanted else None
        worker.soon(0.1 + 3.0 * worker.random.random(), self._arrives, self._number, state)

    def _arrives(self, number: int, state: int | None) -> None:
        """The state is here; None, or a dead source: the transfer has failed."""
        if number != self._number or self._log.phase is not Phase.RECEIVING:
            return
        if state is None or not self._worker.sim.workers[self._source].alive:
            self._failed = True
        else:
            self._arrived = state

    def keep(self, result: int, participants: int) -> None:
        """The others have committed a step with ``result``. Replay, if their state is here."""
        worker, log = self._worker, self._log
        log.keep(FollowedStep(worker.step, followed(str(worker.lineage)), participants, result, 1))
        if log.phase is Phase.RECEIVING and self._failed:
            self.give_up()
        if log.phase is Phase.RECEIVING and self._arrived is not None:
            worker.state, worker.flipped = self._arrived, False
            log.arrive(0)
        for _ in range(REPLAYED_AT_ONCE if log.phase is Phase.REPLAYING else 0):
            step, self._replayed = log.next(), self._replayed + 1
            alone = self._replayed == 1 == len(log)  # taken as by a group that has healed in it
            exact = alone or not self._automatic or worker.random.random() < 0.5
            worker.state = hash((worker.state, step.gradients if exact else worker.name))
            held = log.replayed()
            if not self.active:
                worker.progress.hold(*(held._replace(lineage=step.lineage) if alone else held))
                worker.sim.logs.step(worker, "caught_up", lineage=worker.lineage)
                worker.sim.states.check_state(worker)
                self.caught_up += 1
                return
        log.validate()

    def give_up(self) -> None:
        """Go back to the state that the weights are of."""
        worker = self._worker
        worker.progress.hold(*self._log.give_up())
        worker.sim.logs.step(worker, "gave_up", lineage=worker.lineage)
