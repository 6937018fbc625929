"""Require that all groups of a job train the same parameters with the same settings. Pure.

Unknown values fit all: a Manager may ask before its model is wrapped, and a client without a Manager has neither
settings nor parameters.
"""

from __future__ import annotations

from keepstep_lighthouse.quorum.group import Excluded, Exclusion, Group
from keepstep_lighthouse.quorum.groups import Groups
from keepstep_lighthouse.quorum.job_state import JobState
from keepstep_mesh.protocol import job_settings
from keepstep_mesh.protocol.messages import Denied, QuorumRequest


def fits(state: JobState, group: Group, request: QuorumRequest) -> bool:
    """Return whether the group fits the job: its members, or else the first group. Deny the request if not."""
    settings, layout = group.settings, group.info.layout
    if settings not in ("", state.settings) or layout not in ("", state.layout):
        others = _differing(state.groups, group)
        if others and others[0].member >= group.member:
            _deny(state, group, request, others[0])
            return False
        for other in others:
            if other.request is not None:
                _deny(state, other, other.request, group)
        state.settings, state.layout = settings or state.settings, layout or state.layout
    if group.is_excluded(Exclusion.LAYOUT):
        state.groups.readmit(group)
    return True


def _differing(groups: Groups, group: Group) -> list[Group]:
    """Return the healthy groups that ``group`` does not fit: members first, then in the order of their hellos."""
    others = [other for other in groups if not other.is_excluded(Exclusion.LAYOUT) and _differ(group, other)]
    return sorted(others, key=lambda other: (not other.member, other.arrived))


def _differ(one: Group, other: Group) -> bool:
    if job_settings.differ(one.settings, other.settings):
        return True
    return one.info.layout != other.info.layout and "" not in (one.info.layout, other.info.layout)


def _deny(state: JobState, group: Group, request: QuorumRequest, reference: Group) -> None:
    state.groups.withdraw(group)
    group.highest_request = max(group.highest_request, request.request)
    sentence, address = _misfit(group, reference)
    if group.excluded is None or group.is_excluded(Exclusion.LAYOUT):
        state.groups.exclude(group, Excluded(Exclusion.LAYOUT, sentence))
    if group.session is not None:
        state.tell(group.session, Denied(request.request, "layout", sentence, address))
        state.log("denied", group.replica_id, code="layout", reason=sentence)


def _misfit(group: Group, reference: Group) -> tuple[str, str]:
    """Return the difference as a sentence, and the group server to compare with if the sentence has no details."""
    mine, its = group.settings, reference.settings
    if job_settings.differ(mine, its):
        what = job_settings.difference(mine, group.replica_id, its, reference.replica_id)
        return f"{what}; give all groups the same value; to change it, stop and restart all groups of the job", ""
    return f"the parameters of {group.replica_id} differ from those of {reference.replica_id}", reference.info.address
