"""Which groups hold the state of the job: that from which the last quorum went on, or the one that followed it. Pure.

A sound state, or steps that a group has committed, are no proof: the state may be that of a history which the job has
left, and a group that joins again, heals, or follows the others has committed earlier.
"""

from __future__ import annotations

from keepstep_lighthouse.quorum.groups.group import Group
from keepstep_mesh.protocol.lineage import is_committed, is_following, origin


def holds_newest(group: Group) -> bool:
    """Return whether the group held the state of the last quorum when it last asked, or has taken its step since.

    False for a group that this lighthouse has not answered: its state is unknown until then.
    """
    if group.answer is None or group.diverged or group.heal is not None or is_following(group.lineage):
        return False
    last = group.answer.announce
    if (group.step, group.lineage) == (last.step, last.lineage):
        return True
    took_step = group.step > last.step and is_committed(group.lineage)
    return took_step and origin(group.lineage).quorum_id == last.quorum_id
