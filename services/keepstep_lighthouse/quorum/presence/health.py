"""Health: lose the groups that were silent or disconnected for too long. Pure.

A group is healthy while its session is open and its last frame is younger than ``heartbeat_timeout``. A session that
ends without a graceful leave makes the group *suspect*: it may reconnect within ``reconnect_grace`` as if nothing had
happened. (``departures.lose_reported`` loses a suspect at once if most other members of its quorum report it.)

A tick that is late means that frames may be unread, so every group gets ``LATE_TICK_SECONDS`` more.
"""

from __future__ import annotations

from keepstep_lighthouse.quorum.groups.all_groups import NEVER
from keepstep_lighthouse.quorum.job_state import JobState
from keepstep_lighthouse.quorum.presence import departures

LATE_TICK_SECONDS = 0.25
"""A tick is late if it comes so long after its deadline."""


def deadline(state: JobState) -> float:
    """Return when the next group will have been suspect or silent for too long; in a takeover grace, its end."""
    if state.takeover.until is not None:
        return max(state.takeover.until, state.awake_since)
    policy, groups, due = state.record.policy, state.groups, NEVER
    for silent in groups.by_session.values():
        due = max(silent.heard_at, state.beats_counted_from) + policy.heartbeat_timeout
        break
    for away in groups.suspects.values():
        due = min(due, away.closed_at + policy.reconnect_grace)
        break
    if state.round.left is not None:
        due = min(due, state.round.left[0] + policy.heartbeat_timeout)
    return max(due, state.awake_since)


def check(state: JobState, now: float) -> None:
    """Lose the groups whose deadline has passed; at the end of a takeover grace, the absent members."""
    due = deadline(state)
    if now < due:
        return
    if now > due + LATE_TICK_SECONDS:
        state.awake_since = now + LATE_TICK_SECONDS
    elif state.takeover.until is not None:
        for replica_id in sorted(state.takeover.absent):
            departures.give_up_absent(state, replica_id, "it did not reconnect within takeover_grace", now)
        state.end_grace(now)
    else:
        _lose_overdue(state, now)


def _lose_overdue(state: JobState, now: float) -> None:
    policy, groups = state.record.policy, state.groups
    for group in list(groups.suspects.values()):
        if now < group.closed_at + policy.reconnect_grace:
            break
        reason = f"its connection ended and it did not reconnect within {policy.reconnect_grace:g} s"
        departures.lose(state, group, reason, now)
    for group in list(groups.by_session.values()):
        if now < max(group.heard_at, state.beats_counted_from) + policy.heartbeat_timeout:
            break
        if group.session is not None:
            state.end(group.session)
        departures.lose(state, group, f"it was silent for {policy.heartbeat_timeout:g} s", now)
    if state.round.left is not None and now >= state.round.left[0] + policy.heartbeat_timeout:
        _, group = state.round.left
        state.round.left = None
        reason = f"{group.replica_id} left, so its part of the step may be missing"
        departures.break_round(state, reason, group)
