"""Choose the state from which a job continues: one rule for the lighthouse and every group.

Equal (step, lineage) means equal weights. A lineage names the origin of weights:

* ``7``: committed under quorum 7. ``resumed:5:7``: the same, by a job resumed from a checkpoint under quorum 5.
  ``synchronized:7``, ``resumed:5:synchronized:7``: the same, made equal in that step (``mark_synchronized``).
* ``new:<replica_id>`` or empty: nothing was committed yet; with own weights of the group, or equal ones in all groups.
* ``loaded:<lineage>``: loaded from a checkpoint of that lineage; nothing was committed since.
* ``behind:<replica_id>:<n>``: complete and trained, but different from the job's: the group took part without healing.
* ``diverged:<replica_id>``: complete, but different from the other states with its (step, lineage).
* ``follows:<lineage>``: not here yet. The group takes part without weights in the steps of the groups at ``<lineage>``,
  and keeps the averaged gradients until the weights arrive (``Optimizer(catch_up=True)``). No other group has it, so
  such a group is never a source, and does not count in an average.
* ``torn:<replica_id>``: incomplete, because a heal, or the change of the weights after a commit, failed.

The job continues from the soundest state, among these from the last one resumed, among these from the highest step.
The highest step alone is not enough: a group that was frozen or partitioned while the job was resumed from an older
checkpoint may be at a higher step, and must not undo the resume. The highest quorum_id alone is not enough: a new group
that starts while the trained groups are away would discard their progress.
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
FOLLOWS = "follows:"
TORN = "torn:"
_COMMITTED = re.compile(r"(?:resumed:(\d{1,16}):)?(?:synchronized:)?(\d{1,16})", re.ASCII)


class State(Protocol):
    @property
    def step(self) -> int: ...
    @property
    def lineage(self) -> Lineage: ...


class Soundness(IntEnum):
    """Order of states; the job continues from the highest."""

    FOLLOWING = 0
    """No state."""
    TORN = 1
    DIVERGED = 2
    UNTRAINED = 3
    """At step 0. A torn or diverged state is worth less than that."""
    BEHIND = 4
    """Not the state of the job, but trained."""
    SOUND = 5


class Origin(NamedTuple):
    """Origin of a lineage. ``resumed``: the quorum_id of the last resume from a checkpoint; 0: none."""

    resumed: int
    quorum_id: int
    """Of the last commit; 0: none, or unknown."""


def origin(lineage: Lineage) -> Origin:
    if isinstance(lineage, int):
        return Origin(0, lineage)
    found = _COMMITTED.fullmatch(lineage.removeprefix(LOADED))
    return Origin(int(found[1] or 0), int(found[2])) if found else Origin(0, 0)


def is_torn(lineage: Lineage) -> bool:
    return _is(TORN, lineage)


def is_diverged(lineage: Lineage) -> bool:
    return _is(DIVERGED, lineage)


def following(lineage: Lineage) -> str:
    """Return the lineage of a group that takes part without weights in the steps of groups at ``lineage``."""
    return f"{FOLLOWS}{lineage}"


def is_following(lineage: Lineage) -> bool:
    return isinstance(lineage, str) and lineage.startswith(FOLLOWS)


def followed(lineage: str) -> Lineage:
    """Return the lineage of the groups that a group with this lineage follows."""
    name = lineage.removeprefix(FOLLOWS)
    return int(name) if name.isdecimal() else name


def _is(kind: str, lineage: Lineage) -> bool:
    return isinstance(lineage, str) and lineage.removeprefix(LOADED).startswith(kind)


def is_committed(lineage: Lineage) -> bool:
    """Return whether the state was committed, or healed from one that was, since its process started."""
    return isinstance(lineage, int) or _COMMITTED.fullmatch(lineage) is not None


def soundness(step: int, lineage: Lineage) -> Soundness:
    if isinstance(lineage, int):  # nearly always
        return Soundness.SOUND if step or lineage else Soundness.UNTRAINED
    if is_following(lineage):
        return Soundness.FOLLOWING
    if is_torn(lineage):
        return Soundness.TORN
    if is_diverged(lineage):
        return Soundness.DIVERGED
    if _is(BEHIND, lineage):
        return Soundness.BEHIND
    return Soundness.UNTRAINED if step == 0 and not origin(lineage).quorum_id else Soundness.SOUND


def is_live(step: int, lineage: Lineage) -> bool:
    """Return whether this state comes from training since the job began or resumed."""
    return soundness(step, lineage) is Soundness.SOUND and not is_loaded(lineage)


def is_loaded(lineage: Lineage) -> bool:
    """Return whether the state was loaded from a checkpoint, and no step was committed since."""
    return isinstance(lineage, str) and lineage.startswith(LOADED)


def repeats_steps(lineage: Lineage) -> bool:
    """Return whether a job that continues from this state may repeat committed steps, and so needs a new quorum_id."""
    return isinstance(lineage, str) and lineage.startswith((LOADED, BEHIND, DIVERGED))


def loaded(lineage: Lineage) -> Lineage:
    """Return the lineage of a state loaded from a checkpoint of ``lineage``; empty: the checkpoint has none."""
    return lineage if is_loaded(lineage) else f"{LOADED}{lineage}"


def saved(lineage: Lineage) -> Lineage | None:
    """Return the lineage that a checkpoint stores; None: none."""
    if isinstance(lineage, int):
        return lineage
    lineage = lineage.removeprefix(LOADED)
    if lineage.isdecimal():
        return int(lineage)
    return None if not lineage or lineage.startswith(NEW) else lineage


def same_weights(one: Lineage, other: Lineage) -> bool:
    """Return whether states of these lineages, at one step, are equal: a checkpoint has the lineage that it was saved
    with.
    """
    return one == other or (saved(one) is not None and saved(one) == saved(other))


def committed(reference: Lineage, quorum_id: int, *, synchronized: bool = False) -> Lineage:
    """Return the lineage after a commit under ``quorum_id`` on a state of lineage ``reference``."""
    resumed = quorum_id if is_loaded(reference) else origin(reference).resumed
    if not resumed and not synchronized:
        return quorum_id
    return f"{f'resumed:{resumed}:' if resumed else ''}{'synchronized:' if synchronized else ''}{quorum_id}"


def worth(state: State) -> tuple[int, ...]:
    """Return the sort key of states. A live state is worth more than an equal one from a checkpoint."""
    lineage = state.lineage
    came = origin(lineage)
    return soundness(state.step, lineage), came.resumed, state.step, came.quorum_id, not is_loaded(lineage)


def reference_state(members: Sequence[State]) -> tuple[int, Lineage]:
    """Return the (step, lineage) from which the job continues: of highest worth, then of most members, then of the
    lowest replica_id. ``members`` must be sorted by replica_id and not empty.
    """
    weight = Counter((member.step, member.lineage) for member in members)
    best = max(members, key=lambda member: (*worth(member), weight[member.step, member.lineage]))
    return best.step, best.lineage
