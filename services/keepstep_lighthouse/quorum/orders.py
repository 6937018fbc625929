"""Orders of an administrator: evict, drain, readmit, change the policy. Pure.

An order is written before a group hears of it, and logged with its author. ``target`` is a stable name or one
incarnation.
"""

from __future__ import annotations

from dataclasses import replace

from keepstep_lighthouse.quorum.events import DrainOrdered, EvictOrdered, PolicyOrdered, ReadmitOrdered
from keepstep_lighthouse.quorum.groups.group import Group
from keepstep_lighthouse.quorum.job_state import JobState
from keepstep_lighthouse.quorum.policies import policy_changes, policy_problem
from keepstep_lighthouse.quorum.presence import bans, departures
from keepstep_lighthouse.quorum.probation import parting as probation
from keepstep_mesh.protocol.messages import Drain, Evicted
from keepstep_mesh.protocol.names import name_of


def evict(state: JobState, order: EvictOrdered, now: float, now_unix: float) -> None:
    """Evict the target, even if the lighthouse does not know it or still waits for it after a takeover."""
    found = matching(state, order.target)
    absent = [one for one in sorted(state.takeover.absent) if order.target in (one, name_of(one))]
    incarnations = [group.replica_id for group in found] + absent
    if not incarnations and ":" in order.target:
        incarnations = [order.target]
    if not incarnations and order.ban_seconds <= 0:
        return
    state.lost_at.pop(name_of(order.target), None)  # no group waits for its return
    record = bans.evict(state.record, incarnations, order, now_unix)
    state.persist(record)
    state.log(
        "evicted",
        order.target,
        reason=order.reason,
        by=order.by,
        ban_seconds=order.ban_seconds,
        incarnations=[*incarnations],
        quorum_id=record.quorum_id,
    )
    for group in found:
        if group.session is not None:
            state.tell(group.session, Evicted(order.reason, order.ban_seconds))
            state.end(group.session)
        departures.lose(state, group, f"evicted by {order.by}: {order.reason}", now)
        state.lost_at.pop(group.name, None)
        probation.forgive(state, group.name, "it was evicted")
    for replica_id in absent:
        departures.give_up_absent(state, replica_id, f"evicted by {order.by}: {order.reason}", now)
        state.lost_at.pop(name_of(replica_id), None)
        state.no_longer_absent(replica_id, now)


def drain(state: JobState, order: DrainOrdered) -> None:
    """Ask the target to leave; a disconnected group is asked when it reconnects."""
    for group in matching(state, order.target):
        group.draining, group.drained_by = order.reason, order.by
        if group.session is not None:
            state.tell(group.session, Drain(order.reason))
        state.log("drain", group.replica_id, reason=order.reason, by=order.by)


def readmit(state: JobState, order: ReadmitOrdered, now_unix: float) -> None:
    """Lift bans and evictions of the target, and end its probation. No effect without any."""
    record = bans.readmit(state.record, order.target, now_unix)
    parted = [name for name in (order.target, name_of(order.target)) if name in state.probation.groups]
    if record != state.record or parted:
        # logged first: if the lighthouse is killed in between, the log still explains why the group returns
        state.log("readmitted", order.target, by=order.by, quorum_id=record.quorum_id)
    if record != state.record:
        state.persist(record)
    for name in parted:
        probation.forgive(state, name, f"{order.by} readmitted it")


def change_policy(state: JobState, order: PolicyOrdered, now: float) -> None:
    """Change the policy. No effect if it is invalid or the same."""
    old, policy = state.record.policy, order.policy
    if policy == old or policy_problem(policy) is not None:
        return
    state.persist(replace(state.record, policy=policy))
    names = policy_changes(old, policy)
    changed, before = ({name: getattr(one, name) for name in names} for one in (policy, old))
    state.log("policy", "", by=order.by, changed=changed, before=before, quorum_id=state.record.quorum_id)
    if policy.heartbeat_timeout < old.heartbeat_timeout:
        state.beats_counted_from = now
    if state.takeover.until is not None:
        state.takeover.change_grace(state.takeover_grace)


def matching(state: JobState, target: str) -> list[Group]:
    """Return the groups that the target of an order names."""
    one = state.groups.by_id.get(target)
    return [one] if one is not None else list(state.groups.by_name.get(target, ()))
