"""Compare root digests of live states, to verify that groups with equal (step, lineage) have equal weights. Pure.

They have, unless a bit flipped, or state that differs between groups was registered as the model's. The answer of a
round announces a comparison; each group at the reference state computes its root digest in that step, before the
optimizer changes the state, and sends it with its next request. When the next quorum forms, the roots of one (step,
lineage) are compared: the root of more than half of the groups is right. Without a majority the right one is unknown.

``Policy.verify_every`` announces comparisons too: at each multiple of it, early in a job at ``EARLY_STEPS``, where most
mistakes of a script show, and ``STEPS_AFTER_CHANGE`` steps after the members changed or one of them was behind: a heal
may have loaded less than the whole state. Such comparisons are ``STEPS_BETWEEN`` steps apart at least, so that a job
whose members change often does not compare all the time. Rounds without healing are left out: they are for algorithms
whose groups hold different weights between two averages. Groups that finish send their roots with each request.

Orders are not stored. A lighthouse that takes over compares the roots that it receives, forgets orders, and compares
as after a change of members.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from keepstep_lighthouse.quorum.groups.group import Group
from keepstep_mesh.protocol.lineage import worth
from keepstep_mesh.protocol.membership import Lineage, StateRoot

EARLY_STEPS = (10, 100)
"""Steps of comparisons before the first multiple of ``verify_every``."""
STEPS_AFTER_CHANGE = 3
"""Steps from a change of the members, or from a heal, to a comparison."""
STEPS_BETWEEN = 10
"""Steps between two comparisons because of changes, at least."""


def is_due(step: int, every: int) -> bool:
    """Return whether the groups compare their weights at ``step``, if no member changes and none is behind.

    Args:
        step: of the round, more than 0.
        every: ``verify_every`` of the policy, in steps, more than 0.
    """
    return step % every == 0 or (step in EARLY_STEPS and step < every)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Result for at least two groups at one (step, lineage)."""

    step: int
    lineage: Lineage
    roots: dict[str, list[str]]
    """Each root and the replica_ids that sent it, the most frequent first."""
    missing: list[str]
    """Groups that held that state, are in the quorum now, and sent no root."""
    order: int
    """Number of the last order that this comparison answers; 0: of none."""

    @property
    def right(self) -> str | None:
        """The root of more than half of the groups; None: no majority."""
        root, groups = next(iter(self.roots.items()))
        return root if 2 * len(groups) > sum(map(len, self.roots.values())) else None

    @property
    def diverged(self) -> list[str]:
        """The replica_ids whose root differs from that of the majority; empty without a majority."""
        right = self.right
        if right is None:
            return []
        return sorted(one for root, groups in self.roots.items() for one in groups if root != right)


class Schedule:
    """Steps at which the policy has weights compared."""

    def __init__(self) -> None:
        self._due: int | None = None
        """Step of the next comparison because of a change; None: no change since the last one."""
        self._earliest = 0
        """Earliest step of a comparison because of a change that comes now."""

    def is_due(self, step: int, every: int, *, allow_heal: bool, same_members: bool, all_equal: bool) -> bool:
        """Return whether the groups compare their weights in a round, because of the policy. Call it once a round.

        Args:
            step: of the round.
            every: ``verify_every`` of the policy, in steps; 0: never.
            allow_heal: whether a group that differs may heal in the round.
            same_members: whether the members are those of the round before.
            all_equal: whether all members hold the reference state.
        """
        if self._due is not None and self._due > step + STEPS_BETWEEN:  # the job went back
            self._due, self._earliest = None, 0
        if self._due is None and not (same_members and all_equal):
            self._due = max(step + STEPS_AFTER_CHANGE, self._earliest)
        if not allow_heal or not every or not step:
            return False
        if all_equal and self._due is not None and step >= self._due:
            self._due, self._earliest = None, step + STEPS_BETWEEN
            return True
        return is_due(step, every)


def compare(chosen: list[Group], expected: Container[str], order: int) -> Comparison | None:
    """Compare the roots in the requests of ``chosen``; None: fewer than two groups at one state.

    Args:
        expected: groups that were requested to send a root.
        order: as in ``Comparison``.
    """
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
    return Comparison(
        step=step,
        lineage=lineage,
        roots=dict(sorted(found.items(), key=lambda one: -len(one[1]))),
        missing=sorted(
            one.replica_id
            for one in chosen
            if one.replica_id not in compared and (one.replica_id in expected or _is_final(one))
        ),
        order=order,
    )


def _is_final(group: Group) -> bool:
    return group.request is not None and group.request.final


def _state(root: StateRoot) -> tuple[int, Lineage]:
    return root.step, root.lineage
