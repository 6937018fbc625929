"""Open a session: of a new group, one that reconnects, or a member that the previous lighthouse answered. Pure."""

from __future__ import annotations

from itertools import islice

from keepstep_lighthouse.quorum.events import Opened
from keepstep_lighthouse.quorum.forming import membership
from keepstep_lighthouse.quorum.groups.group import Group
from keepstep_lighthouse.quorum.job_state import JobState
from keepstep_lighthouse.quorum.presence import bans, departures, ports
from keepstep_lighthouse.quorum.probation import parting as probation
from keepstep_mesh.protocol.membership import HeldAnswer
from keepstep_mesh.protocol.messages import Drain, MemberLost, Refused, RoundBroken


def open_session(state: JobState, event: Opened, now: float, now_unix: float) -> None:
    """Refuse the session, or add its group to the job; a session that the group had before ends."""
    seen = max(event.quorum_id_seen, event.held.quorum_id if event.held else 0)
    refusal, code = bans.refusal(state.record, event.replica_id, now_unix), "banned"
    limit = membership.HIGHEST_QUORUM_ID_SEEN
    if seen > max(limit, state.record.quorum_id):
        refusal, code = f"invalid quorum_id {seen} (limit {limit}); restart this group", "bad_message"
    if refusal is not None:
        state.tell(event.session, Refused(code, refusal))
        state.end(event.session)
        state.log("refused", event.replica_id, reason=refusal)
        return
    if seen > state.record.quorum_id:
        membership.raise_quorum_id(state, seen)
        if state.announcer.last is None:
            state.takeover.wait((), now, state.takeover_grace)
    group = state.groups.by_id.get(event.replica_id)
    if group is None:
        member = event.replica_id in state.members
        group = state.groups.add(event.replica_id, event.session, now, member=member)
        state.lost_at.pop(group.name, None)
        if len(state.groups) == 1:
            state.active_since = now_unix
        if event.standby and not member:
            state.groups.stand_by(group)
        probation.keep_out(state, group)
        state.log("joined", event.replica_id, member=member)
        ports.returned(state, event.replica_id)
    else:
        if group.session is not None:
            state.tell(group.session, Refused("replaced", f"{group.replica_id} opened another session"))
            state.end(group.session)
        state.groups.connect(group, event.session, now)
    group.host, group.local, group.groups = event.host, event.local, event.groups
    if group.replica_id in state.takeover.absent:
        state.no_longer_absent(group.replica_id, now)
    if group.draining is not None:
        state.tell(event.session, Drain(group.draining))
    if event.held is not None:
        _check_held(state, group, event.session, event.held)


def _check_held(state: JobState, group: Group, session: int, held: HeldAnswer) -> None:
    """Tell a group that reconnected with an answer whether that step can still be completed."""
    last, quorum_id = state.announcer.last, state.record.quorum_id
    if held.quorum_id < quorum_id:
        reason = f"quorum {held.quorum_id} is over, the job is at {quorum_id}"
        state.tell(session, RoundBroken(held.quorum_id, reason))
    elif state.round.lost:
        for replica_id, reason in islice(state.round.lost.items(), departures.MAX_LOSSES_TOLD):
            state.tell(session, MemberLost(quorum_id, replica_id, reason))
    elif state.round.broken and (last is None or held.step == last.step):
        state.tell(session, RoundBroken(quorum_id, "the round was broken while the connection was closed"))
    elif last is None:
        state.takeover.holds(group, held.step)
        departures.tell_stranded(state)
