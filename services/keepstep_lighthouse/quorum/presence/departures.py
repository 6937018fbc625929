"""Departures of groups, and the messages that follow. Pure.

When a group is lost, every live member of its quorum gets ``MemberLost``, and so does a member that reconnects later
while it holds that quorum's answer. ``leave`` and ``moved`` are not losses: no message, no wait.
"""

from __future__ import annotations

from keepstep_lighthouse.quorum import heals
from keepstep_lighthouse.quorum.events import LeftOnPurpose
from keepstep_lighthouse.quorum.groups.group import Group
from keepstep_lighthouse.quorum.job_state import JobState
from keepstep_lighthouse.quorum.presence import job_end, losses
from keepstep_lighthouse.quorum.probation import parting as probation
from keepstep_lighthouse.quorum.views.replicas import gone_view
from keepstep_mesh.protocol.messages import Goodbye, MemberLost, RoundBroken
from keepstep_mesh.protocol.names import name_of

MAX_LOSSES_TOLD = 16
"""Number of ``MemberLost`` for one quorum; its members drop the step after the first."""


def leave(state: JobState, group: Group, event: LeftOnPurpose, now: float) -> None:
    """The group leaves on purpose. Write the step at which it finished, then send its Goodbye."""
    said = job_end.parting(group, event)
    job_end.note_parting(state, group, said)
    state.tell(event.session, Goodbye())
    if said.cause == job_end.FAILED:
        losses.note(state, group.name, now)
        losses.count(state, group.replica_id, draining=group.draining is not None)
        probation.lost_while_healing(state, group, said.sentence, now)
    _part(state, group, said.sentence, said.job_code, now)
    state.log("left", group.replica_id, reason=event.reason, cause=said.cause, step=said.step)


def move(state: JobState, group: Group, now: float) -> None:
    """The group continues with another lighthouse."""
    reason = "continues with another lighthouse"
    _part(state, group, reason, job_end.STOPPED, now)
    state.log("moved", group.replica_id, reason=reason)


def _part(state: JobState, group: Group, sentence: str, job_code: str, now: float) -> None:
    """The group leaves on purpose, which is not a loss."""
    if group.session is not None:
        state.end(group.session)
    _forget(state, group, sentence, now)
    _went(state, job_code, f"{group.replica_id} {sentence}", member=group.member)
    if group.member and state.round.left is None:
        state.round.left = now, group


def lose(state: JobState, group: Group, reason: str, now: float) -> None:
    """The group is lost. The caller ends its session, if it has one."""
    if group.excluded is None:
        losses.note(state, group.name, now)
    losses.count(state, group.replica_id, draining=group.draining is not None)
    probation.lost_while_healing(state, group, reason, now)
    _forget(state, group, reason, now)
    _went(state, job_end.FAILED, f"{group.replica_id} was lost: {reason}", member=group.member)
    state.log("lost", group.replica_id, reason=reason, member=group.member)
    if group.member:
        _tell_lost(state, group.replica_id, reason)


def lose_reported(state: JobState, now: float) -> None:
    """Lose suspects at once, without further grace, when most other members of their quorum report it broken."""
    suspects = state.groups.suspects
    if not suspects:
        return
    members = len(state.members)
    if 2 * len(state.round.reports) < members or state.takeover.until is not None:
        return
    for group in list(suspects.values()):
        if group.member and state.round.is_given_up_by_most(group.replica_id, members):
            lose(state, group, "its connection ended and most of its quorum report it as lost", now)


def give_up_absent(state: JobState, replica_id: str, reason: str, now: float) -> None:
    """A member of the quorum that was found in the store is lost without having reconnected."""
    losses.note(state, name_of(replica_id), now)
    losses.count(state, replica_id)
    state.round.reports.add(replica_id)
    _went(state, job_end.FAILED, f"{replica_id} was lost: {reason}", member=True)
    state.log("lost", replica_id, reason=reason, member=True)
    _tell_lost(state, replica_id, reason)


def break_round(state: JobState, reason: str, without: Group) -> None:
    """Send ``RoundBroken``: ``without`` has no answer of the last round, so the others cannot complete it."""
    if state.round.broken:
        return
    state.round.broken = True
    sessions = state.member_sessions(lambda group: group.request is None and group is not without)
    if sessions:
        state.tell_all(sessions, RoundBroken(state.record.quorum_id, reason))
        state.log("round_broken", without.replica_id, reason=reason)


def tell_stranded(state: JobState) -> None:
    """Send ``RoundBroken`` to members that hold an answer of the previous lighthouse which other members never got."""
    stranded = state.takeover.take_stranded()
    sessions = tuple(group.session for group in stranded if group.session is not None)
    if sessions:
        reason = f"the previous lighthouse answered step {state.takeover.held_step} to some members only"
        state.tell_all(sessions, RoundBroken(state.record.quorum_id, reason))
        state.log("round_broken", "", reason=reason)


def _tell_lost(state: JobState, replica_id: str, reason: str) -> None:
    state.round.broken = True
    state.round.lost[replica_id] = reason
    state.takeover.forget_answers()
    if len(state.round.lost) > MAX_LOSSES_TOLD:
        return
    if sessions := state.member_sessions(lambda _: True):
        state.tell_all(sessions, MemberLost(state.record.quorum_id, replica_id, reason))


def _went(state: JobState, job_code: str, why: str, *, member: bool) -> None:
    """Note what follows for the job if no group is left. A group that never trained says little about it."""
    if member or state.last_gone is None:
        state.last_gone = job_code, why


def _forget(state: JobState, group: Group, reason: str, now: float) -> None:
    heals.end(state, group, reason)
    state.gone.add(gone_view(group, state.groups, state.record, now, reason), now)
    state.groups.remove(group)
    state.reports.forget(group.replica_id)
    state.takeover.is_gone(group)
    if group.member:
        state.round.reports.add(group.replica_id)
