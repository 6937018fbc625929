"""Compare the weights of groups when a quorum forms, and let the consequences follow. Pure."""

from __future__ import annotations

from keepstep_lighthouse.quorum.forming.quorum_rules import choose
from keepstep_lighthouse.quorum.groups.group import Group
from keepstep_lighthouse.quorum.job_state import JobState
from keepstep_lighthouse.quorum.verification import comparisons, divergence
from keepstep_lighthouse.quorum.verification.comparisons import Comparison, Schedule


class Verification:
    def __init__(self, job: JobState) -> None:
        self._job = job
        self._schedule = Schedule()
        self._orders = 0
        """Number of orders so far."""
        self._answered = 0
        """Last order that a comparison has answered."""
        self._covered = 0
        """Last order when roots were last requested."""
        self.refused: Comparison | None = None
        """The comparison because of which groups were refused since the last quorum."""

    def order(self, by: str) -> None:
        """An operator has the weights compared once."""
        self._orders += 1
        self._job.log("verify_ordered", "", by=by, order=self._orders)

    def asks_for_roots(self, step: int, equal: int, *, allow_heal: bool, same_members: bool, all_equal: bool) -> bool:
        """Return whether the groups compare their weights in a round that is announced: see ``Compares``."""
        due = self._schedule.is_due(
            *(step, self._job.record.policy.verify_every),
            allow_heal=allow_heal,
            same_members=same_members,
            all_equal=all_equal,
        )
        self._covered = self._orders
        return (due or self._answered < self._orders) and equal > 1

    def compare(self, chosen: list[Group]) -> Comparison | None:
        """Compare the weights of the groups of a quorum, if the policy or an operator wants that."""
        groups, last = self._job.groups, self._job.last
        if groups.roots < 2 or (groups.final and not self._job.record.policy.verify_every):
            return None
        if last is None or not last.verify:
            return comparisons.compare(chosen, (), 0)
        state = last.step, last.lineage
        expected = {one.replica_id for one in last.members if (one.step, one.lineage) == state}
        return comparisons.compare(chosen, expected, self._covered if self._covered > self._answered else 0)

    def refuse_diverged(self) -> bool:
        """Refuse groups whose weights differ again. Return whether any was refused."""
        comparison = self.compare(choose(self._job.groups, self._job.record))
        if comparison is None or not divergence.refuse_repeated(self._job, comparison):
            return False
        self.refused = comparison
        return True

    def settle(self, chosen: list[Group]) -> tuple[Comparison | None, str]:
        """Compare the weights of the groups of a quorum that forms, and mark those that heal in it.

        Returns:
            The comparison for ``divergence.tell``, and what the members learn of it.
        """
        comparison, differ = self.compare(chosen), ""
        if comparison is not None:
            self._answered = max(self._answered, comparison.order)
            divergence.mark(self._job, comparison)
            differ = divergence.sentence(self._job, comparison)
        if self.refused is not None and not differ:
            self._answered = max(self._answered, self.refused.order)
            comparison, differ = None, divergence.sentence(self._job, self.refused, refused=True)
        self.refused = None
        return comparison, differ
