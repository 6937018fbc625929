"""Rules for the groups.

* Groups at an equal (step, lineage) hold equal states, over all groups that ever lived, until a bit flips.
* All groups take the same groups for the members of a quorum.
* A group that allows no heal is in no round with healing.
* A quorum goes on from a sound state if a member has one: from the one that was resumed last, then of the highest step.
* No checkpoint from which no step was committed takes back groups that took part without healing.
* Groups whose states are compared are found equal, as long as no bit flipped.
* The logs of lighthouses and groups pass ``keepstep check-history``.
* Groups that finish do so at one step, with one state, and take no step beyond it.
* Once the faults stop, all groups soon have ended, if they take a last step. Else:
* Once the faults stop, all groups soon train in one quorum, in equal states (``recovered``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from keepstep.group.quorum_plan import QuorumPlan
from keepstep_mesh.protocol.lineage import (
    BEHIND,
    Soundness,
    followed,
    is_following,
    is_live,
    is_loaded,
    same_weights,
    soundness,
)
from keepstep_mesh.protocol.membership import FinalState, Lineage, Member
from keepstep_mesh.protocol.messages import Quorum, QuorumRequest
from tests.simulation.checks.history import Logs

if TYPE_CHECKING:
    from tests.simulation.actors.worker import Worker

COMMITS_AFTER = 3
"""Steps that every group has to commit after the faults."""


class Checkpoint(NamedTuple):
    """A checkpoint that a group saved. ``manager``: the state dict of its manager."""

    step: int
    lineage: Lineage
    manager: dict[str, Any]
    state: int


class StateChecks:
    """``memberships``: replica_ids by quorum_id, as they were announced. ``violated`` reports a broken rule."""

    def __init__(self, memberships: Mapping[int, tuple[str, ...]], violated: Callable[[str], None]) -> None:
        self.flips = 0
        """Bits that flipped."""
        self._memberships = memberships
        self._violated = violated
        self._states: dict[tuple[int, Lineage], int] = {}
        self._resumed: dict[tuple[int, Lineage], int] = {}
        """By (step, lineage): the quorum_id under which the job last went on from a checkpoint, if it ever did."""
        self._end: tuple[FinalState, int] | None = None
        """The state at which the first group finished."""
        self._commits_before: dict[str, int] = {}

    def check_state(self, worker: Worker) -> None:
        step, lineage = worker.step, worker.lineage
        if is_following(lineage):  # without weights
            return
        if not worker.flipped and self._states.setdefault((step, lineage), worker.state) != worker.state:
            self._violated(f"{worker.replica_id} holds another state at step {step}, lineage {lineage!r}, than others")

    def check_plan(self, worker: Worker, plan: QuorumPlan, asked: QuorumRequest) -> None:
        if self._memberships[plan.quorum_id] != plan.replica_ids:
            self._violated(f"{worker.replica_id} takes {plan.replica_ids} for quorum {plan.quorum_id}")
        if plan.allow_heal and not asked.allow_heal and not plan.finishing:
            self._violated(f"{worker.replica_id} allows no heal, and is in a round with healing")

    def check_reference(self, quorum: Quorum, plan: QuorumPlan) -> None:
        """Check that no member of ``quorum`` holds a better state than the one that its plan goes on from."""
        if quorum.uniform:  # steps in the list are old
            return
        reference = self._rank(plan.max_step, plan.lineage)
        if is_loaded(plan.lineage) and not any(is_live(one.step, one.lineage) for one in quorum.listed):
            later = [one for one in quorum.listed if _is_behind(one) and one.step >= plan.max_step]
            if later:
                self._violated(f"quorum {plan.quorum_id} goes back to a checkpoint of {plan.max_step}, and has {later}")
        for member in quorum.listed:
            if self._rank(member.step, member.lineage) > reference:
                state = f"step {plan.max_step}, lineage {plan.lineage!r}"
                self._violated(f"quorum {plan.quorum_id} goes on from {state}, though it has {member}")

    def _rank(self, step: int, lineage: Lineage) -> tuple[bool, int, int]:
        if soundness(step, lineage) is not Soundness.SOUND:
            return False, 0, 0
        return True, self._resumed.get((step, lineage), 0), step

    def loaded(self, worker: Worker, checkpoint: Checkpoint) -> None:
        self._resumed[worker.step, worker.lineage] = self._resumed.get((checkpoint.step, checkpoint.lineage), 0)
        self.check_state(worker)

    def committed(self, worker: Worker, plan: QuorumPlan, *, behind: bool) -> None:
        last = worker.sim.last_step
        if last is not None and worker.step > last:
            self._violated(f"{worker.replica_id} commits step {worker.step}, and the last step is {last}")
        if not behind:
            before = self._resumed.get((plan.max_step, plan.lineage), 0)
            lineage = worker.lineage
            if isinstance(lineage, str) and is_following(lineage):  # the next quorum may go on from this group alone
                lineage = followed(lineage)
            self._resumed[worker.step, lineage] = plan.quorum_id if is_loaded(plan.lineage) else before
        self.check_state(worker)

    def finished(self, worker: Worker, final: FinalState) -> None:
        """Check the state with which a group finishes. Groups that never trained (step 0) do not close the job."""
        if worker.step != final.step or not same_weights(worker.lineage, final.lineage):
            state = f"step {worker.step}, lineage {worker.lineage!r}"
            self._violated(f"{worker.replica_id} finishes at {state}, and the job is closed at {final}")
        first, weights = self._end = self._end or (final, worker.state)
        if final != first or worker.state != weights:
            self._violated(f"{worker.replica_id} finishes at {final}, another group at {first}, or with other weights")

    def check_logs(self, logs: Logs) -> None:
        if not self.flips and logs.events("replicas_differ"):
            self._violated("equal groups were found to differ")
        for violation in logs.report().violations:
            self._violated(f"the history is wrong, {violation.rule}: {violation.what}")

    def faults_stopped(self, workers: Mapping[str, Worker]) -> None:
        """Count commits from now on."""
        self._commits_before = {replica_id: worker.commits for replica_id, worker in workers.items()}

    def recovered(self, latest: Mapping[str, Worker], members: Collection[str], spares: int) -> bool:
        """Whether all groups live, all but ``spares`` are the ``members`` of the last quorum, have committed, and hold
        one state.
        """
        living = [worker for worker in latest.values() if worker.alive]
        training = [worker for worker in living if worker.replica_id in members]
        if len(living) < len(latest) or not len(living) - spares <= len(training) == len(members):
            return False
        if any(one.commits - self._commits_before.get(one.replica_id, 0) < COMMITS_AFTER for one in training):
            return False
        return len({(worker.step, worker.lineage, worker.state) for worker in training}) == 1


def _is_behind(member: Member) -> bool:
    return isinstance(member.lineage, str) and member.lineage.startswith(BEHIND)
