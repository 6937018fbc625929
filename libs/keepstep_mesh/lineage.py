"""Which of several states a job goes on from. One rule for the lighthouse and for every group.

Equal (step, lineage) means equal weights. A lineage is the quorum_id of the last commit; before the first commit it
is the group's incarnation, or empty. Those count as 0: of two groups that never committed neither has come further.
Below every sound state, whatever its step, counts one whose weights were found to differ from the others', and below
that one that a broken heal left half written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from keepstep_mesh.messages import Lineage, Member

TORN = "torn:"
"""Start of the lineage of a state that a broken heal left half written."""
DIVERGED = "diverged:"
"""Start of the lineage of a state that is whole, and was found to differ from those of its (step, lineage)."""


def is_torn(lineage: Lineage) -> bool:
    return isinstance(lineage, str) and lineage.startswith(TORN)


def is_diverged(lineage: Lineage) -> bool:
    return isinstance(lineage, str) and lineage.startswith(DIVERGED)


def lineage_rank(lineage: Lineage) -> int:
    """How far a lineage has come: its quorum_id, 0 before the first commit, -1 for a diverged, -2 for a torn state."""
    if isinstance(lineage, int):
        return lineage
    return -2 if is_torn(lineage) else -is_diverged(lineage)


def reference_state(members: Sequence[Member]) -> tuple[int, Lineage]:
    """The (step, lineage) that the job goes on from: of the sound states, if there is one, the highest step, then the
    highest lineage, then the most members, then the lowest replica_id. ``members`` are sorted by replica_id and not
    empty.
    """
    weight = Counter((member.step, member.lineage) for member in members)

    def worth(member: Member) -> tuple[int, ...]:
        rank = lineage_rank(member.lineage)
        return min(rank, 0), member.step, rank, weight[member.step, member.lineage]

    best = max(members, key=worth)
    return best.step, best.lineage
