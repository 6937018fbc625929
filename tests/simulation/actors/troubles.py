"""Groups that keep others from committing, and the evidence that groups send about steps that failed.

The evidence follows ``keepstep.step.evidence.failure_evidence``. A group that lies sends other evidence.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Literal

from keepstep.group.quorum_plan import QuorumPlan
from keepstep_mesh.protocol.membership import OWN, PEER, UNKNOWN, StepFailure
from keepstep_mesh.protocol.names import name_of

if TYPE_CHECKING:
    from tests.simulation.actors.collectives import Collectives
    from tests.simulation.actors.worker import Worker

TROUBLES_TIMEOUT_SECONDS = 2.0
"""Of a collective. Short, so that groups in trouble often fail steps."""
Trouble = Literal["fails", "lies", "heals in vain"]
"""``fails``: each of its steps fails by itself; ``lies``: the same, and it says that it cannot reach others."""


class Troubles:
    """The troubles of all groups, by stable name; a restart does not end one."""

    def __init__(self, seed: int, collectives: Collectives) -> None:
        self._random = Random(f"troubles {seed}")
        self._collectives = collectives
        self._of: dict[str, Trouble] = {}
        self._lost: set[tuple[str, int]] = set()
        """Groups that learned of the loss of a member, and the quorum."""

    def begin(self, name: str, trouble: Trouble) -> None:
        self._of[name] = trouble

    def end(self, name: str) -> None:
        self._of.pop(name, None)

    def has(self, name: str, trouble: Trouble) -> bool:
        found = self._of.get(name)
        return found == trouble or (found == "lies" and trouble == "fails")

    def member_lost(self, worker: Worker, quorum_id: int) -> None:
        self._lost.add((worker.replica_id, quorum_id))

    def evidence(self, worker: Worker, plan: QuorumPlan, *, own: bool) -> StepFailure | None:
        """Return what a group says about its failed step. ``own``: the step failed by itself."""
        if (worker.replica_id, plan.quorum_id) in self._lost or len(plan.members) == 1:
            return None
        others = [one for one in plan.replica_ids if one != worker.replica_id]
        if self._of.get(worker.name) == "lies":
            named = self._random.sample(others, self._random.randint(1, len(others)))
            return StepFailure(plan.quorum_id, PEER, tuple(named))
        if own:
            return StepFailure(plan.quorum_id, OWN, reason="bad batch")
        silent = [one for one in others if self._collectives.is_partitioned(worker.name, name_of(one))]
        return StepFailure(plan.quorum_id, PEER if silent else UNKNOWN, tuple(silent))
