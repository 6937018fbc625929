"""The progress of a replica group: its committed steps, and the lineage of its weights. Pure.

Equal (step, lineage) means equal weights in all groups; ``protocol.lineage`` lists the lineages.
"""

from __future__ import annotations

from typing import Any

from keepstep_mesh.protocol import lineage as lineages
from keepstep_mesh.protocol.lineage import BEHIND, DIVERGED, TORN, is_torn
from keepstep_mesh.protocol.membership import Lineage


class GroupProgress:
    """Steps, batches and lineage of one group. ``lineage``: of the weights that the group starts with."""

    def __init__(self, replica_id: str, lineage: Lineage) -> None:
        self.step = 0
        self.batches_committed = 0
        self.lineage = lineage
        self._first = lineage
        self.commit_failures = 0
        """Number of discarded steps in a row."""
        self._replica_id = replica_id
        self._fell_behind = 0
        """Number of times; part of the lineage, so that different states of this group have different lineages."""

    def state_dict(self) -> dict[str, Any]:
        """Return ``step``, ``batches_committed`` and, after the first commit, ``lineage``."""
        state: dict[str, Any] = {"step": self.step, "batches_committed": self.batches_committed}
        if (lineage := lineages.saved(self.lineage)) is not None:
            state["lineage"] = lineage
        return state

    def load(self, state: dict[str, Any]) -> None:
        """Load the state of another group. The caller sets its lineage."""
        self.step = int(state["step"])
        self.batches_committed = int(state["batches_committed"])

    def resume(self, state: dict[str, Any]) -> None:
        """Load a checkpoint of the user. One of torchft has no lineage."""
        self.load(state)
        if self.step or "lineage" in state:
            self.lineage = lineages.loaded(state.get("lineage", ""))
        elif self.lineage != self._first:  # back to before the first commit: the same steps come again
            self.lineage = lineages.loaded(self._first)

    def tear(self, step: int = 0) -> None:
        """Mark the state as torn. ``step``: of the job, for the script."""
        self.step, self.lineage = step, f"{TORN}{self._replica_id}"

    def diverge(self) -> None:
        """Mark the weights as diverged: complete, and different from those of the other groups."""
        self.lineage = f"{DIVERGED}{self._replica_id}"

    def hold(self, step: int, lineage: Lineage, batches_committed: int) -> None:
        """Take over a state that the group holds now."""
        self.step, self.lineage, self.batches_committed = step, lineage, batches_committed

    def follow(self, step: int, lineage: Lineage, batches_committed: int) -> None:
        """Take part without weights in the steps of the groups at (``step``, ``lineage``)."""
        self.hold(step, lineages.following(lineage), batches_committed)

    def fall_behind(self) -> Lineage:
        """Return a new lineage of complete weights that no other group has: this group heals if it can."""
        self._fell_behind += 1
        return f"{BEHIND}{self._replica_id}:{self._fell_behind}"

    @property
    def following(self) -> bool:
        """Whether the group takes part without weights."""
        return lineages.is_following(self.lineage)

    @property
    def torn(self) -> bool:
        """Whether the state is torn."""
        return is_torn(self.lineage)

    def commit(self, quorum_id: int, participants: int, *, behind: bool) -> None:
        """Count a committed step.

        Args:
            quorum_id: of the step.
            participants: number of groups that took part.
            behind: the group took part without healing, and still has other weights than the cohort.
        """
        self.step += 1
        self.batches_committed += participants
        self.commit_failures = 0
        if isinstance(self.lineage, str) and self.following:
            self.lineage = lineages.following(lineages.committed(lineages.followed(self.lineage), quorum_id))
        elif not behind:
            self.lineage = lineages.committed(self.lineage, quorum_id)
        elif not self._has_own_lineage():
            self.lineage = self.fall_behind()

    def _has_own_lineage(self) -> bool:
        """Return whether no other group can have this lineage."""
        own = isinstance(self.lineage, str) and self.lineage.startswith(f"{BEHIND}{self._replica_id}:")
        return own or lineages.is_diverged(self.lineage) or is_torn(self.lineage)

    def commit_synchronized(
        self, step: int, lineage: Lineage, batches_committed: int, quorum_id: int, participants: int
    ) -> None:
        """Count a committed step that made all groups equal.

        Args:
            step: of the reference state.
            lineage: of the reference state.
            batches_committed: of the reference state.
            quorum_id: of the step.
            participants: number of groups that took part.
        """
        self.step, self.batches_committed = step + 1, batches_committed + participants
        self.lineage = lineages.committed(lineage, quorum_id, synchronized=True)
        self.commit_failures = 0

    def discard(self) -> None:
        """Count a discarded step."""
        self.commit_failures += 1
