"""What must hold of the groups.

* Groups at an equal (step, lineage) hold equal states, over all groups that ever lived, until a bit flips.
* All groups take the same groups for the members of a quorum.
* A group that allows no heal is in no round with healing.
* Groups whose states are compared are found equal, as long as no bit flipped.
* What lighthouses and groups wrote into their logs passes ``keepstep check-history``.
* Once the faults stop, all groups soon train in one quorum, in equal states (``recovered``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from keepstep.group.quorum_plan import QuorumPlan
from keepstep_mesh.protocol.membership import Lineage
from keepstep_mesh.protocol.messages import QuorumRequest
from tests.simulation.checks.history import Logs

if TYPE_CHECKING:
    from tests.simulation.actors.worker import Worker

COMMITS_AFTER = 3
"""Steps that every group has to commit after the faults."""


class StateChecks:
    """``memberships``: replica_ids by quorum_id, as they were announced. ``violated`` reports a broken rule."""

    def __init__(self, memberships: Mapping[int, tuple[str, ...]], violated: Callable[[str], None]) -> None:
        self.flips = 0
        """Bits that flipped."""
        self._memberships = memberships
        self._violated = violated
        self._states: dict[tuple[int, Lineage], int] = {}
        self._commits_before: dict[str, int] = {}

    def check_state(self, worker: Worker) -> None:
        step, lineage = worker.step, worker.lineage
        if not worker.flipped and self._states.setdefault((step, lineage), worker.state) != worker.state:
            self._violated(f"{worker.replica_id} holds another state at step {step}, lineage {lineage!r}, than others")

    def check_plan(self, worker: Worker, plan: QuorumPlan, asked: QuorumRequest) -> None:
        if self._memberships[plan.quorum_id] != plan.replica_ids:
            self._violated(f"{worker.replica_id} takes {plan.replica_ids} for quorum {plan.quorum_id}")
        if plan.allow_heal and not asked.allow_heal:
            self._violated(f"{worker.replica_id} allows no heal, and is in a round with healing")

    def check_logs(self, logs: Logs) -> None:
        if not self.flips and logs.events("replicas_differ"):
            self._violated("equal groups were found to differ")
        for violation in logs.report().violations:
            self._violated(f"the history is wrong, {violation.rule}: {violation.what}")

    def faults_stopped(self, workers: Mapping[str, Worker]) -> None:
        """Count commits from now on."""
        self._commits_before = {replica_id: worker.commits for replica_id, worker in workers.items()}

    def recovered(self, latest: Mapping[str, Worker], members: Collection[str]) -> bool:
        """Whether all groups live, are the ``members`` of the last quorum, have committed, and hold one state."""
        living = [worker for worker in latest.values() if worker.alive]
        if len(living) < len(latest) or set(members) != {worker.replica_id for worker in living}:
            return False
        if any(one.commits - self._commits_before.get(one.replica_id, 0) < COMMITS_AFTER for one in living):
            return False
        return len({(worker.step, worker.lineage, worker.state) for worker in living}) == 1
