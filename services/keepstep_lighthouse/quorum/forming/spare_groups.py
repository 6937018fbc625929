"""Spares: groups that are ready to train, and wait until the job has fewer groups than it should have. Pure.

A group that may stand by (``Hello.standby``) is a spare until it is let in. It is connected, does not count, and no
group waits for it. From then on it is a group like any other, until its process ends.
"""

from __future__ import annotations

from keepstep_lighthouse.quorum.groups.all_groups import Groups
from keepstep_lighthouse.quorum.groups.group import Exclusion, Group
from keepstep_lighthouse.quorum.groups.newest_state import holds_newest
from keepstep_lighthouse.quorum.job_record import Policy
from keepstep_lighthouse.quorum.probation.parted import Probation
from keepstep_mesh.protocol.lineage import worth


def target(groups: Groups, policy: Policy) -> int:
    """Return the number of groups that train when none is missing: as the groups tell, within the policy."""
    wanted = max(groups.expected or policy.initial_replicas, policy.min_replicas)
    return min(wanted, policy.max_replicas or wanted)


def ready(groups: Groups, probation: Probation) -> list[Group]:
    """Return the spares that could train in the next quorum: those with the newest state first, then the oldest."""
    waiting = [
        group
        for group in groups.standing_by.values()
        if group.request is not None
        and group.is_excluded(Exclusion.SPARE)
        and group.draining is None
        and not probation.is_out(group.name)
    ]
    waiting.sort(key=lambda group: group.arrived)
    return sorted(waiting, key=worth, reverse=True)


def trains_well(group: Group) -> bool:
    """Return whether the group has committed a step, holds the state of the job, and stays."""
    stays = group.member and group.excluded is None and group.draining is None
    return stays and group.committed > 0 and holds_newest(group)
