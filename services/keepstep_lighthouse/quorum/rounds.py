"""Events of the current quorum since it was last announced."""

from __future__ import annotations

from keepstep_lighthouse.quorum.group import Group


class Round:
    def __init__(self) -> None:
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
