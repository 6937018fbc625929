"""Events of the current quorum since it was last announced."""

from __future__ import annotations

from keepstep_lighthouse.quorum.groups.group import Group
from keepstep_mesh.protocol.membership import StepFailure


class Round:
    """``number``: counts the announced quorums. ``began``: when this one was announced; None: by another lighthouse."""

    def __init__(self, number: int = 0, began: float | None = None) -> None:
        self.number, self.began = number, began
        self.failures: dict[str, StepFailure] = {}
        """Why the step failed in members that have asked again, by stable name."""
        self.failed_heals: dict[str, str] = {}
        """Errors of members whose heal did not end in a commit, by stable name."""
        self.judged = False
        """The failures have been judged."""
        self.lost: dict[str, str] = {}
        """Members that were lost, with the reason."""
        self.reports: set[str] = set()
        """Members that left, were lost, or asked again after a failed commit."""
        self.broken = False
        """Not all members can complete the answer; the members at work have been notified."""
        self.left: tuple[float, Group] | None = None
        """The first member that left, and when."""

    def is_given_up_by_most(self, replica_id: str, members: int) -> bool:
        """Return whether more than half of the other members reported the round as broken, or left."""
        return 2 * (len(self.reports) - (replica_id in self.reports)) > members - 1
