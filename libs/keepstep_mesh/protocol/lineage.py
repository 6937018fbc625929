"""Which of several states a job goes on from. One rule for the lighthouse and for every group.

Equal (step, lineage) means equal weights. A lineage says where weights come from:

* ``7``: committed under quorum 7. ``resumed:5:7``: also, by a job that went on from a checkpoint under quorum 5.
  ``synchronized:7``, ``resumed:5:synchronized:7``: also, and made equal in that step (``mark_synchronized``).
* ``new:<replica_id>``, or empty: nothing was committed yet; of each group's own weights, or of weights equal in all.
* ``loaded:<lineage>``: as a checkpoint of that lineage was loaded; nothing was committed since.
* ``behind:<replica_id>:<n>``: whole and trained, but not the job's. The group took part without healing.
* ``diverged:<replica_id>``: whole, and found to differ from the others of its (step, lineage).
* ``torn:<replica_id>``: a broken heal left it half written.

The job goes on from the soundest state, of those from the one that was resumed last, of those from the highest step.
Why not simply from the highest step: after a resume from an older checkpoint, a group of the time before that comes
back (it was frozen, or cut off) may stand at a higher step, and must not undo the resume. Why not from the highest
quorum_id: a group that starts from nothing while the trained ones are away would undo all that they hold.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

from keepstep_mesh.protocol.membership import Lineage

NEW = "new:"
LOADED = "loaded:"
BEHIND = "behind:"
DIVERGED = "diverged:"
TORN = "torn:"
_COMMITTED = re.compile(r"(?:resumed:(\d{1,16}):)?(?:synchronized:)?(\d{1,16})", re.ASCII)


class State(Protocol):
    @property
    def step(self) -> int: ...
    @property
    def lineage(self) -> Lineage: ...


class Soundness(IntEnum):
    """What a state is good for; the job goes on from the highest that is there."""

    TORN = 0
    DIVERGED = 1
    UNTRAINED = 2
    """Step 0. What was found to be wrong is no better than a new beginning."""
    BEHIND = 3
    """No state of the job, but better than a new beginning."""
    SOUND = 4


class Origin(NamedTuple):
    """Of a lineage. ``resumed``: the quorum_id under which its job last went on from a checkpoint; 0: it never did."""

    resumed: int
    quorum_id: int
    """Of the last commit; 0: not known, or there was none."""


def origin(lineage: Lineage) -> Origin:
    if isinstance(lineage, int):
        return Origin(0, lineage)
    found = _COMMITTED.fullmatch(lineage.removeprefix(LOADED))
    return Origin(int(found[1] or 0), int(found[2])) if found else Origin(0, 0)


def is_torn(lineage: Lineage) -> bool:
    return _is(TORN, lineage)


def is_diverged(lineage: Lineage) -> bool:
    return _is(DIVERGED, lineage)


def _is(kind: str, lineage: Lineage) -> bool:
    return isinstance(lineage, str) and lineage.removeprefix(LOADED).startswith(kind)


def soundness(step: int, lineage: Lineage) -> Soundness:
    if is_torn(lineage):
        return Soundness.TORN
    if is_diverged(lineage):
        return Soundness.DIVERGED
    if _is(BEHIND, lineage):
        return Soundness.BEHIND
    return Soundness.UNTRAINED if step == 0 and not origin(lineage).quorum_id else Soundness.SOUND


def begins_anew(lineage: Lineage) -> bool:
    """A job that goes on from this state may come to steps again that it had committed: under a new quorum_id, then."""
    return isinstance(lineage, str) and lineage.startswith((LOADED, BEHIND, DIVERGED))


def loaded(lineage: Lineage) -> Lineage:
    """Of the state as a checkpoint of ``lineage`` was loaded; empty: it has none."""
    return lineage if isinstance(lineage, str) and lineage.startswith(LOADED) else f"{LOADED}{lineage}"


def saved(lineage: Lineage) -> Lineage | None:
    """What a checkpoint holds of it; None: nothing."""
    if isinstance(lineage, int):
        return lineage
    lineage = lineage.removeprefix(LOADED)
    if lineage.isdecimal():
        return int(lineage)
    return None if not lineage or lineage.startswith(NEW) else lineage


def committed(reference: Lineage, quorum_id: int, *, synchronized: bool = False) -> Lineage:
    """Of the state that a commit under ``quorum_id`` makes of one of lineage ``reference``."""
    is_loaded = isinstance(reference, str) and reference.startswith(LOADED)
    resumed = quorum_id if is_loaded else origin(reference).resumed
    if not resumed and not synchronized:
        return quorum_id
    return f"{f'resumed:{resumed}:' if resumed else ''}{'synchronized:' if synchronized else ''}{quorum_id}"


def worth(state: State) -> tuple[int, ...]:
    """What states are compared by, in this order; of else equal ones a live state comes before a loaded checkpoint."""
    lineage = state.lineage
    came = origin(lineage)
    live = not (isinstance(lineage, str) and lineage.startswith(LOADED))
    return soundness(state.step, lineage), came.resumed, state.step, came.quorum_id, live


def reference_state(members: Sequence[State]) -> tuple[int, Lineage]:
    """The (step, lineage) that the job goes on from: the one of most worth, then of most members, then of the lowest
    replica_id. ``members`` are sorted by replica_id and not empty.
    """
    weight = Counter((member.step, member.lineage) for member in members)
    best = max(members, key=lambda member: (*worth(member), weight[member.step, member.lineage]))
    return best.step, best.lineage
