"""Losses: which of them are failures, and which groups the others wait for at the end of training. Pure.

A launcher starts a lost group again. A group that was evicted, drained, or stopped by a signal does not come back soon.
Not stored: a lighthouse that takes over knows the members of the quorum that did not reconnect.
"""

from __future__ import annotations

from keepstep_lighthouse.quorum.job_state import JobState
from keepstep_mesh.protocol.names import name_of

MAX_REMEMBERED = 1000


def note(state: JobState, name: str, now: float) -> None:
    """The group of this name was lost, or its script failed."""
    waited_for = expected(state, now)
    state.lost_at = {one: lost for one, lost in state.lost_at.items() if one in waited_for}
    if len(state.lost_at) < MAX_REMEMBERED:
        state.lost_at[name] = now


def expected(state: JobState, now: float) -> dict[str, float]:
    """Return when the groups were lost that are waited for, by name."""
    since = now - state.record.policy.finish_grace
    here = state.groups.by_name
    return {name: lost for name, lost in state.lost_at.items() if lost > since and name not in here}


def count(state: JobState, replica_id: str, *, draining: bool = False) -> None:
    """Count the loss if it is a failure: the group has trained, no order told it to leave, and the job is not over."""
    record = state.record
    ordered = draining or replica_id in record.evicted
    over = record.closed is not None or record.ended is not None
    if name_of(replica_id) in state.were_members and not ordered and not over:
        state.groups.tally.failures += 1
