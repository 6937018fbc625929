"""Let spares in where groups are missing, and replace groups that have to leave. Pure.

* A group that may stand by is a spare from its arrival on (``spare_groups``). It is let in when it asks and the
  job has fewer groups than it should have: at the start the first ones that ask, later after a loss. The spare with the
  newest state comes first, then the one that arrived first.
* A group with an order to replace it counts as missing, and stays. When so many others have committed a step that the
  job has all its groups without it, it is drained: it leaves between two steps, and no step is lost. The order is
  stored until the group has left. If the group comes back as a spare, it is drained at once. A group that has to leave
  soon is drained when the spare for it is gone. If
  ``max_replicas`` has no room for the spare beside it, it is drained first. With ``max_replicas`` 1 no group would be
  left: orders are refused, and those that wait are dropped.
* Nothing is decided during the grace of a takeover, in which the groups that train may not have reconnected.
* Groups that finish are not missing. If the last group that has trained leaves on purpose, the spares leave too: alone
  they would train the whole job again. If it is lost, they go on from a checkpoint.
"""

from __future__ import annotations

from dataclasses import replace as changed

from keepstep_lighthouse.quorum import orders
from keepstep_lighthouse.quorum.events import DrainOrdered, ReplaceOrdered
from keepstep_lighthouse.quorum.finishing import closing as finishing
from keepstep_lighthouse.quorum.forming import spare_groups
from keepstep_lighthouse.quorum.groups.group import Group
from keepstep_lighthouse.quorum.job_record import Replacement
from keepstep_lighthouse.quorum.job_state import JobState
from keepstep_lighthouse.quorum.presence import job_end, losses
from keepstep_lighthouse.quorum.views.reasons import named

NO_SPARE = "no spare is ready"


def settle(state: JobState, now: float) -> None:
    """Let spares in, and send spares home that are no longer needed."""
    if state.takeover.until is not None:
        return
    if state.last_gone is not None or state.dismissed is not None:
        _send_home(state)
    if not (state.groups.standing_by or state.record.replacing):
        return
    if _finishes(state):
        return
    _drop_old_orders(state)
    _drain_spares_with_orders(state)
    _let_in(state, now)


def _finishes(state: JobState) -> bool:
    return bool(state.finished_step) and state.record.ended is None


def replace(state: JobState, order: ReplaceOrdered) -> None:
    """Replace the groups that the order names. No effect on those that leave already, or do not train."""
    for group in orders.matching(state, order.target):
        if group.excluded is None and group.draining is None and not _is_ordered(state, group):
            new = Replacement(group.replica_id, order.reason, order.by)
            state.persist(changed(state.record, replacing=(*state.record.replacing, new)))
            state.log("replace", group.replica_id, reason=order.reason, by=order.by)


def leaves_soon(state: JobState, group: Group, reason: str) -> None:
    """The group has to leave. Replace it, or drain it if no spare is ready, or if the one for it is gone."""
    if group.draining is not None:
        return
    if _is_ordered(state, group):
        if _is_without_spare(state, group):
            orders.drain(state, DrainOrdered(group.replica_id, f"{reason}; {NO_SPARE}", group.name))
        return
    if (why := refusal(state, group)) is None:
        replace(state, ReplaceOrdered(group.replica_id, reason, group.name))
    else:
        orders.drain(state, DrainOrdered(group.replica_id, f"{reason}; {why}", group.name))


def refusal(state: JobState, group: Group) -> str | None:
    """Return why no spare can replace this group now, as a sentence; None: one can, or is about to."""
    if _is_ordered(state, group):
        return None
    if group.stands_by:
        return f"{group.replica_id} is a spare itself"
    if group.excluded is not None:
        return f"{group.replica_id} does not train: {group.excluded.sentence or group.excluded.reason.value}"
    if group.draining is not None:
        return f"{group.replica_id} is draining already"
    if not spare_groups.ready(state.groups, state.probation):
        return NO_SPARE
    if state.record.policy.max_replicas == 1:
        return _no_room(group)
    return None


def _is_ordered(state: JobState, group: Group) -> bool:
    return any(one.replica_id == group.replica_id for one in state.record.replacing)


def _is_without_spare(state: JobState, group: Group) -> bool:
    """Return whether no spare is left for a group with an order: none is ready, and others have those that were."""
    if state.takeover.until is not None or spare_groups.ready(state.groups, state.probation):
        return False
    leaving = [one for one, _ in _to_replace(state)]
    stay = [one for one in state.groups if one.excluded is None and one.draining is None and one not in leaving]
    without = spare_groups.target(state.groups, state.record.policy) - len(stay)
    return group in leaving[max(0, len(leaving) - without) :] if without > 0 else False


def _ended_on_purpose(state: JobState) -> bool:
    """Return whether the last group that has trained left on purpose."""
    if state.last_gone is None or state.last_gone[0] == job_end.FAILED or state.record.ended is not None:
        return False
    if not state.members:  # none has trained yet
        return False
    return not any(group.member for group in state.groups)


def _send_home(state: JobState) -> None:
    """Let the spares leave that the end of the job leaves behind; after a stop not those that come later."""
    if not _ended_on_purpose(state):
        state.dismissed = None
        return
    spares_here = [group for group in state.groups if group.came_as_spare]
    if state.dismissed is None or state.finished_step:
        state.dismissed = frozenset(group.replica_id for group in spares_here)
    step = max(state.reached, state.record.finished_step)
    how = "finished" if state.finished_step else "ended"
    for group in spares_here:
        if group.replica_id in state.dismissed and group.request is not None and group.draining is None:
            finishing.send_home(state, group, f"the job {how} at step {step}, and no group needs this spare")


def _drop_old_orders(state: JobState) -> None:
    """Drop the orders for groups that have left; for all groups, if ``max_replicas`` has no room for a spare."""
    full = state.record.policy.max_replicas == 1
    replacing = tuple(one for one in state.record.replacing if one.replica_id in state.groups.by_id and not full)
    if replacing == state.record.replacing:
        return
    waiting = _to_replace(state) if full else ()
    state.persist(changed(state.record, replacing=replacing))
    for group, _ in waiting:
        state.log("not_replaced", group.replica_id, reason=_no_room(group))


def _drain_spares_with_orders(state: JobState) -> None:
    """Drain the groups with an order that came back as spares, because they were not yet members: no place is lost."""
    for order in state.record.replacing:
        group = state.groups.by_id.get(order.replica_id)
        if group is not None and group.stands_by and group.draining is None:
            orders.drain(state, DrainOrdered(group.replica_id, f"it stands by: {order.reason}", order.by))


def _no_room(group: Group) -> str:
    return f"max_replicas 1 has no room for a spare beside {group.replica_id}; raise it (keepstep policy)"


def _to_replace(state: JobState) -> list[tuple[Group, Replacement]]:
    """Return the groups that wait for their replacement, with the orders."""
    known = ((state.groups.by_id.get(one.replica_id), one) for one in state.record.replacing)
    return [(group, one) for group, one in known if group and group.draining is None and group.excluded is None]


def _let_in(state: JobState, now: float) -> None:
    groups, leaving = state.groups, [group.replica_id for group, _ in _to_replace(state)]
    target = spare_groups.target(groups, state.record.policy)
    most = state.record.policy.max_replicas or target + len(leaving)
    missing = min(target + len(leaving), most) - groups.counted
    if missing <= 0 or not groups.standing_by:
        return
    for spare in spare_groups.ready(groups, state.probation)[:missing]:
        there = groups.counted
        groups.let_in(spare, now)
        if state.record.quorum_id != state.record.first_quorum_id:
            lost = ", ".join(sorted(losses.expected(state, now)))
            why = f"{there} of {target} groups were there" + (f", without {lost}" if lost else "")
            state.log("spare_in", spare.replica_id, reason=f"it replaces {named(leaving)}" if there >= target else why)
    if groups.counted >= target:
        state.lost_at.clear()  # no group waits for the return of those that were replaced


def drain_replaced(state: JobState) -> None:
    """Drain the groups that spares have replaced, after a quorum may have been formed without some groups."""
    if state.takeover.until is not None or _finishes(state) or not (waiting := _to_replace(state)):
        return
    policy = state.record.policy
    target = spare_groups.target(state.groups, policy)
    least = target - 1 if policy.max_replicas == target else target  # no room for a spare before the group has left
    ready = sum(map(spare_groups.trains_well, state.groups))
    for group, order in waiting:
        left = ready - spare_groups.trains_well(group)
        if left < least:
            return
        orders.drain(state, DrainOrdered(group.replica_id, f"replaced: {order.reason}", order.by))
        ready = left
