"""What has become of the current quorum since it was last announced."""

from __future__ import annotations

from keepstep_lighthouse.quorum.group import Group


class Round:
    def __init__(self) -> None:
        self.lost: dict[str, str] = {}
        """Members that were lost, with the reason."""
        self.reports: set[str] = set()
        """Members that left, were lost, or asked again after a failed commit."""
        self.broken = False
        """Not all members can complete the answer, and those at work have been told."""
        self.left: tuple[float, Group] | None = None
        """The first member that left, and when."""

    def is_given_up_by_most(self, replica_id: str, members: int) -> bool:
        """More than half of the other members report it broken, or are gone."""
        return 2 * (len(self.reports) - (replica_id in self.reports)) > members - 1
