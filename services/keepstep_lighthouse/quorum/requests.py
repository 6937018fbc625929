"""Open, answer again, or withdraw the quorum request of a group. Pure."""

from __future__ import annotations

from dataclasses import replace

from keepstep_lighthouse.quorum import heals, retries
from keepstep_lighthouse.quorum.features import Features
from keepstep_lighthouse.quorum.groups.group import Exclusion, Group
from keepstep_lighthouse.quorum.job_state import JobState
from keepstep_mesh.protocol.messages import QuorumRequest


def ask(features: Features, group: Group, request: QuorumRequest, now: float) -> None:
    """Open the request. If it was answered before its connection broke, repeat the answer while that is current."""
    job, probation = features.job, features.probation
    if request.info is not None:
        group.settings = request.settings
        if request.info != group.info:
            group.info = request.info
            if group.member:
                features.announcer.info_changed()
        features.ports.find(group)
    if request.request < group.highest_request:
        return
    groups, on_probation = job.groups, probation.partings.groups
    if job.record.closed is not None and features.finishing.answer(group, request):
        return
    if request.last_step is not None:
        features.reports.note(group, request.last_step)
    if request.durable_relays:
        features.reports.note_durable_relays(request.durable_relays)
    if request.replace:
        features.spares.leaves_soon(group, request.replace)
    last, session = job.last, group.session
    current = last is not None and last.quorum_id == job.record.quorum_id and not job.round.broken
    answer = group.answer if current and group.answer is not None and group.answer.announce is last else None
    if answer is not None and session is not None and request.request == answer.request:
        job.decisions.append(replace(answer.announce, to=((session, request.request),)))
        group.answer = answer._replace(session=session)
        return
    if group.heal is not None:
        heals.end(job, group, "its step was not committed" if request.commit_failures else "")
    if not features.agreements.fits(group, request):
        return
    if group.groups != group.size:
        groups.set_size(group, group.groups)
    if request.commit_failures:
        probation.note(group, request)
    if on_probation:
        probation.keep_out(group)
    where_it_was, commits = (group.step, group.lineage), group.committed
    groups.open(group, request, now)
    if on_probation and group.is_excluded(Exclusion.PARTED):
        retries.deny_parted(job, group)
    if group.committed > commits and (on_probation or probation.partings.failed_heals):
        probation.committed(group)
    if last is None and (group.member or not job.record.members):
        features.takeover.asks(group, request.step)
    if not group.member:
        return
    if request.commit_failures:
        job.round.reports.add(group.replica_id)
        features.departures.lose_reported(now)
    if answer is not None and request.commit_failures:
        job.break_round(f"{group.replica_id} did not commit the step", group)
    elif answer is not None and where_it_was == (group.step, group.lineage) and session != answer.session:
        job.break_round(f"{group.replica_id} lost its connection before it had the answer", group)


def cancel(job: JobState, group: Group, number: int) -> None:
    """Withdraw the request; if it has been answered, the group ignores the answer, so the round breaks."""
    answer = group.answer
    if group.request is not None and group.request.request == number:
        job.groups.withdraw(group)
    elif group.member and answer is not None and answer.announce is job.last and answer.request == number:
        job.break_round(f"{group.replica_id} withdrew its request before it had the answer", group)
