"""Whether groups that count as equal are: root digests of their live states, compared. Pure.

Equal (step, lineage) means equal weights, unless a bit flipped, or state of one group only was registered as the
model's. A round's answer says that there will be a comparison; whoever holds the reference state takes its root digest
in that step, before the optimizer changes it, and sends it with its next request. When the next quorum forms, the roots
of one (step, lineage) are compared: what more than half of them say is right. Without such a majority nobody can tell.

What is asked for is not stored. A lighthouse that takes over compares the roots that come, and forgets orders.
"""

from __future__ import annotations

from dataclasses import dataclass

from keepstep_lighthouse.quorum.events import Announce
from keepstep_lighthouse.quorum.group import Group
from keepstep_mesh.protocol.lineage import worth
from keepstep_mesh.protocol.membership import Lineage, StateRoot


@dataclass(frozen=True, slots=True)
class Comparison:
    """At least two groups were at one (step, lineage)."""

    step: int
    lineage: Lineage
    roots: dict[str, list[str]]
    """Each root and the replica_ids that said it, the most frequent first."""
    missing: list[str]
    """Groups that held that state, are in the quorum now, and said no root."""
    order: int
    """Of the last order that this comparison answers; 0: of none."""

    @property
    def right(self) -> str | None:
        """The root of more than half; None: there is none."""
        root, groups = next(iter(self.roots.items()))
        return root if 2 * len(groups) > sum(map(len, self.roots.values())) else None

    @property
    def diverged(self) -> list[str]:
        """replica_ids of those whose root is not the right one, if that is known."""
        right = self.right
        if right is None:
            return []
        return sorted(one for root, groups in self.roots.items() for one in groups if root != right)


class Verification:
    def __init__(self) -> None:
        self._orders = 0
        """Orders so far; they are numbered from 1."""
        self._answered = 0
        """The last of them that a comparison has answered."""
        self._covered = 0
        """The last of them when roots were last asked for."""
        self._expected: frozenset[str] = frozenset()
        """Who was asked then."""

    @property
    def wanted(self) -> bool:
        """An order is not answered yet."""
        return self._answered < self._orders

    def order(self) -> int:
        """The number of the new order."""
        self._orders += 1
        return self._orders

    def announced(self, announce: Announce) -> None:
        """``compare`` before it said what the round before brought."""
        self._covered, self._expected = 0, frozenset()
        if announce.verify:
            self._covered = self._orders
            state = announce.step, announce.lineage
            self._expected = frozenset(m.replica_id for m in announce.members if (m.step, m.lineage) == state)

    def compare(self, chosen: list[Group]) -> Comparison | None:
        """The roots that ``chosen`` bring with their requests; None when there are no two of one state."""
        said = [(one.replica_id, one.request.root) for one in chosen if one.request and one.request.root is not None]
        if len(said) < 2:
            return None
        step, lineage = _state(max((root for _, root in said), key=worth))
        found: dict[str, list[str]] = {}
        for replica_id, root in said:
            if _state(root) == (step, lineage):
                found.setdefault(root.digest, []).append(replica_id)
        compared = {one for groups in found.values() for one in groups}
        if len(compared) < 2:
            return None
        order = self._covered if self._covered > self._answered else 0
        self._answered = max(self._answered, self._covered)
        return Comparison(
            step=step,
            lineage=lineage,
            roots=dict(sorted(found.items(), key=lambda one: -len(one[1]))),
            missing=sorted(one.replica_id for one in chosen if one.replica_id in self._expected - compared),
            order=order,
        )


def _state(root: StateRoot) -> tuple[int, Lineage]:
    return root.step, root.lineage
