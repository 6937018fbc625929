"""Where a replica group stands: its committed steps, and which weights it holds. Pure.

Equal (step, lineage) means equal weights in all groups; ``protocol.lineage`` says what lineages there are.
"""

from __future__ import annotations

from typing import Any

from keepstep_mesh.protocol import lineage as lineages
from keepstep_mesh.protocol.lineage import BEHIND, DIVERGED, TORN, is_torn
from keepstep_mesh.protocol.membership import Lineage


class GroupProgress:
    """``lineage``: of the weights that the group starts with."""

    def __init__(self, replica_id: str, lineage: Lineage) -> None:
        self.step = 0
        self.batches_committed = 0
        self.lineage = lineage
        self.commit_failures = 0
        """In a row."""
        self._replica_id = replica_id
        self._fell_behind = 0
        """How often. So no two states of this group, or of checkpoints of it, are taken for one."""

    def state_dict(self) -> dict[str, Any]:
        """``step``, ``batches_committed`` and, once there was a commit, ``lineage``."""
        state: dict[str, Any] = {"step": self.step, "batches_committed": self.batches_committed}
        if (lineage := lineages.saved(self.lineage)) is not None:
            state["lineage"] = lineage
        return state

    def load(self, state: dict[str, Any]) -> None:
        """Takes over the state of another group. The caller knows its lineage."""
        self.step = int(state["step"])
        self.batches_committed = int(state["batches_committed"])

    def resume(self, state: dict[str, Any]) -> None:
        """From a checkpoint; torchft's has no lineage."""
        self.load(state)
        if self.step or "lineage" in state:
            self.lineage = lineages.loaded(state.get("lineage", ""))

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
            self.lineage = lineages.committed(self.lineage, quorum_id)
        elif not self._keeps_apart():
            self._fell_behind += 1
            self.lineage = f"{BEHIND}{self._replica_id}:{self._fell_behind}"

    def _keeps_apart(self) -> bool:
        """Its lineage equals nobody's as it is."""
        own = isinstance(self.lineage, str) and self.lineage.startswith(f"{BEHIND}{self._replica_id}:")
        return own or lineages.is_diverged(self.lineage) or is_torn(self.lineage)

    def commit_synchronized(
        self, step: int, lineage: Lineage, batches_committed: int, quorum_id: int, participants: int
    ) -> None:
        """As all groups that were made equal in that step, from the reference state's first three."""
        self.step, self.batches_committed = step + 1, batches_committed + participants
        self.lineage = lineages.committed(lineage, quorum_id, synchronized=True)
        self.commit_failures = 0

    def discard(self) -> None:
        self.commit_failures += 1
