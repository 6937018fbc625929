"""Record a group that the others waited for, and decide whether a straggler is drained. Pure.

The metrics service compares groups and reports stragglers. The decision is made here, from the job's policy and from
what this lighthouse observed: the report is not an order.
"""

from __future__ import annotations

from keepstep_lighthouse.quorum.events import StragglerFound
from keepstep_lighthouse.quorum.forming.quorum_rules import min_groups
from keepstep_lighthouse.quorum.job_state import JobState


def log_wait(job: JobState) -> None:
    """Log the group that asked last for the quorum that forms, if the first one waited half of the join timeout.

    A group that never had an answer is left out: it starts, and the others wait for it by the policy. Groups that train
    while they ask do not wait.
    """
    first, asking = job.groups.first_asked(), job.groups.asking
    if first is None or len(asking) < 2 or min_groups(job.groups):
        return
    last = asking[next(reversed(asking))]
    if last.answer is not None and last.asked_at - first > job.record.policy.join_timeout / 2:
        job.log("waited_for", last.replica_id, seconds=round(last.asked_at - first, 1), step=last.step)


def refusal(job: JobState, found: StragglerFound) -> str | None:
    """Return why the group is not drained, as a sentence; None: it is.

    The group must have committed as many steps here as it must have been slow, so that a group that has just
    reconnected is not drained for its past. One group drains at a time, and the rest must be enough for the job.
    """
    policy, groups = job.record.policy, job.groups
    after = policy.drain_straggler_after
    group = groups.by_id.get(found.replica_id)
    if not after:
        return "the policy does not drain stragglers (drain_straggler_after is 0)"
    if group is None or not group.member:
        return "it is not a member of the quorum"
    if (leaving := next((one for one in groups if one.draining is not None), None)) is not None:
        return f"{leaving.replica_id} is draining, and groups drain one at a time"
    if found.steps < after:
        return f"it was a straggler for {found.steps} steps in a row, and drain_straggler_after is {after}"
    if group.committed < after:
        return f"it has committed {group.committed} steps since it connected, and drain_straggler_after is {after}"
    others = (one for one in groups if one is not group)
    stay = sum(one.member and one.session is not None and one.holds_newest() for one in others)
    if stay < policy.min_replicas:
        return f"{stay} would be left, and min_replicas is {policy.min_replicas}"
    return None


def drain(job: JobState, found: StragglerFound) -> None:
    """Drain the group unless ``refusal`` has a reason not to."""
    if refusal(job, found) is not None:
        return
    reason = (
        f"it was a straggler for {found.steps} steps in a row: it needs {found.seconds:.3g} s for a step, the median "
        f"of the groups is {found.median_seconds:.3g} s"
    )
    job.drain(found.replica_id, reason, found.by)
