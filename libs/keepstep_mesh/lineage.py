"""Which of several states a job goes on from. One rule for the lighthouse and for every group.

Equal (step, lineage) means equal weights. A lineage is the quorum_id of the last commit; before the first commit it
is the group's incarnation, or empty. Those count as 0: of two groups that never committed neither has come further. A
state that a broken heal left half written counts below everything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from keepstep_mesh.messages import Lineage, Member

TORN = "torn:"
"""Start of the lineage of a state that a broken heal left half written."""


def is_torn(lineage: Lineage) -> bool:
    return isinstance(lineage, str) and lineage.startswith(TORN)


def lineage_rank(lineage: Lineage) -> int:
    """How far a lineage has come: its quorum_id, 0 before the first commit, -1 for a torn state."""
    if isinstance(lineage, int):
        return lineage
    return -1 if is_torn(lineage) else 0


def reference_state(members: Sequence[Member]) -> tuple[int, Lineage]:
    """The (step, lineage) that the job goes on from: the highest step, then the highest lineage, then the most members,
    then the lowest replica_id. ``members`` are sorted by replica_id and not empty.
    """
    weight = Counter((member.step, member.lineage) for member in members)
    best = max(members, key=lambda m: (m.step, lineage_rank(m.lineage), weight[m.step, m.lineage]))
    return best.step, best.lineage
