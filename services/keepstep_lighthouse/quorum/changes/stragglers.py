"""Whether a group that the metrics service finds to be a straggler is asked to leave. Pure.

The metrics service compares the groups and counts. What follows is decided here, by the job's policy and by what this
lighthouse saw itself: who says so orders nothing.
"""

from __future__ import annotations

from keepstep_lighthouse.quorum.changes import orders
from keepstep_lighthouse.quorum.events import DrainOrdered, StragglerFound
from keepstep_lighthouse.quorum.group import HEALING
from keepstep_lighthouse.quorum.job_state import JobState


def refusal(state: JobState, found: StragglerFound) -> str | None:
    """Why the group stays, as a sentence; None: it is asked to leave.

    It has to have trained here for as long as it has to have been slow, so that one that just came back is not sent
    away for what it was before. One group goes at a time, and those that stay are enough for the job.
    """
    policy, groups = state.record.policy, state.groups
    after = policy.drain_straggler_after
    group = groups.by_id.get(found.replica_id)
    if not after:
        return "the policy of this job drains no straggler (drain_straggler_after is 0)"
    if group is None or not group.member:
        return "the quorum has no such incarnation"
    if (leaving := next((one for one in groups if one.draining is not None), None)) is not None:
        return f"{leaving.replica_id} is asked to leave, and one goes at a time"
    if found.steps < after:
        return f"it was one for {found.steps} steps in a row, and drain_straggler_after is {after}"
    if group.committed < after:
        return f"it has committed {group.committed} steps here since it came, and drain_straggler_after is {after}"
    others = (one for one in groups if one is not group)
    stay = sum(one.member and one.session is not None and one.state is not HEALING for one in others)
    if stay < policy.min_replicas:
        return f"{stay} would stay, and min_replicas is {policy.min_replicas}"
    return None


def drain(state: JobState, found: StragglerFound) -> None:
    """Nothing happens when there is a ``refusal``."""
    if refusal(state, found) is not None:
        return
    reason = (
        f"it was a straggler for {found.steps} steps in a row: it needs {found.seconds:.3g} s for a step, the median "
        f"of the groups is {found.median_seconds:.3g} s"
    )
    orders.drain(state, DrainOrdered(found.replica_id, reason, found.by))
