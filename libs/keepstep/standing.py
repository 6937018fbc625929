"""Where a replica group stands: its committed steps, and which weights it holds. Pure.

Equal (step, lineage) means equal weights in all groups (SEMANTICS, section 2). The lineage is the quorum_id of the last
commit; before the first one a group's own id, or "" where all groups begin with equal weights.
"""

from __future__ import annotations

from typing import Any

from keepstep_mesh.lineage import DIVERGED, TORN, is_torn
from keepstep_mesh.messages import Lineage


class Standing:
    """``lineage``: of the weights that the group starts with."""

    def __init__(self, replica_id: str, lineage: Lineage) -> None:
        self.step = 0
        self.batches_committed = 0
        self.lineage = lineage
        self.commit_failures = 0
        """In a row."""
        self._replica_id = replica_id

    def state_dict(self) -> dict[str, Any]:
        """``step``, ``batches_committed`` and, once there was a commit, ``lineage``."""
        state: dict[str, Any] = {"step": self.step, "batches_committed": self.batches_committed}
        if isinstance(self.lineage, int):
            state["lineage"] = self.lineage
        return state

    def load(self, state: dict[str, Any]) -> None:
        """From a checkpoint, or from another group; torchft's has no lineage."""
        self.step = int(state["step"])
        self.batches_committed = int(state["batches_committed"])
        self.lineage = state.get("lineage", self.lineage if self.step == 0 else "")

    def tear(self) -> None:
        """The state is of no step any more."""
        self.step, self.lineage = 0, f"{TORN}{self._replica_id}"

    def diverge(self) -> None:
        """The weights are whole, and were found to differ from those of the other groups."""
        self.lineage = f"{DIVERGED}{self._replica_id}"

    @property
    def torn(self) -> bool:
        return is_torn(self.lineage)

    def commit(self, quorum_id: int, participants: int, *, behind: bool) -> None:
        """``behind``: the group took part as it was, without healing, and still holds other weights than the cohort."""
        self.step += 1
        self.batches_committed += participants
        self.commit_failures = 0
        if not behind:
            self.lineage = quorum_id

    def discard(self) -> None:
        self.commit_failures += 1
