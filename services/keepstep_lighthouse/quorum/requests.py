"""Open, answer again, or withdraw the quorum request of a group. Pure."""

from __future__ import annotations

from dataclasses import replace

from keepstep_lighthouse.quorum import heals, retries, spares
from keepstep_lighthouse.quorum.agreement import agreements, reports
from keepstep_lighthouse.quorum.finishing import closing as finishing
from keepstep_lighthouse.quorum.groups.group import Exclusion, Group
from keepstep_lighthouse.quorum.job_state import JobState
from keepstep_lighthouse.quorum.presence import departures, ports
from keepstep_lighthouse.quorum.probation import parting as probation
from keepstep_mesh.protocol.messages import QuorumRequest


def ask(state: JobState, group: Group, request: QuorumRequest, now: float) -> None:
    """Open the request. If it was answered before its connection broke, repeat the answer while that is current."""
    if request.info is not None:
        group.settings = request.settings
        if request.info != group.info:
            group.info = request.info
            if group.member:
                state.announcer.info_changed()
        ports.find(state, group)
    if request.request < group.highest_request:
        return
    groups, on_probation = state.groups, state.probation.groups
    if state.record.closed is not None and finishing.answer(state, group, request):
        return
    if request.last_step is not None:
        reports.note(state, group, request.last_step)
    if request.durable_relays:
        reports.note_durable_relays(state, request.durable_relays)
    if request.replace:
        spares.leaves_soon(state, group, request.replace)
    last, session = state.announcer.last, group.session
    current = last is not None and last.quorum_id == state.record.quorum_id and not state.round.broken
    answer = group.answer if current and group.answer is not None and group.answer.announce is last else None
    if answer is not None and session is not None and request.request == answer.request:
        state.decisions.append(replace(answer.announce, to=((session, request.request),)))
        group.answer = answer._replace(session=session)
        return
    if group.heal is not None:
        heals.end(state, group, "its step was not committed" if request.commit_failures else "")
    if not agreements.fits(state, group, request):
        return
    if group.groups != group.size:
        groups.set_size(group, group.groups)
    if request.commit_failures:
        probation.note(state, group, request)
    if on_probation:
        probation.keep_out(state, group)
    where_it_was, commits = (group.step, group.lineage), group.committed
    groups.open(group, request, now)
    if on_probation and group.is_excluded(Exclusion.PARTED):
        retries.deny_parted(state, group)
    if group.committed > commits and (on_probation or state.probation.failed_heals):
        probation.committed(state, group)
    if last is None and (group.member or not state.record.members):
        state.takeover.asks(group, request.step)
        departures.tell_stranded(state)
    if not group.member:
        return
    if request.commit_failures:
        state.round.reports.add(group.replica_id)
        departures.lose_reported(state, now)
    if answer is not None and request.commit_failures:
        departures.break_round(state, f"{group.replica_id} did not commit the step", group)
    elif answer is not None and where_it_was == (group.step, group.lineage) and session != answer.session:
        departures.break_round(state, f"{group.replica_id} lost its connection before it had the answer", group)


def cancel(state: JobState, group: Group, number: int) -> None:
    """Withdraw the request; if it has been answered, the group ignores the answer, so the round breaks."""
    if group.request is not None and group.request.request == number:
        state.groups.withdraw(group)
    elif (
        group.member
        and group.answer is not None
        and group.answer.announce is state.announcer.last
        and group.answer.request == number
    ):
        reason = f"{group.replica_id} withdrew its request before it had the answer"
        departures.break_round(state, reason, group)
