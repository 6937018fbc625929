"""All groups of a job train the same parameters: whose layout does a group have to fit? Pure."""

from __future__ import annotations

from keepstep_lighthouse.groups import Group, Groups, KeptOut
from keepstep_lighthouse.job_state import JobState
from keepstep_mesh.messages import Denied, QuorumRequest


def fits(state: JobState, group: Group, request: QuorumRequest) -> bool:
    """Denies a request whose parameters are not the job's: those of a healthy member, else of who came first."""
    layout = group.info.layout
    if layout and layout != state.layout:
        others = _differing(state.groups, group)
        if others and others[0].member >= group.member:
            _deny(state, group, request, others[0])
            return False
        for other in others:
            if other.request is not None:
                _deny(state, other, other.request, group)
        state.layout = layout
    if group.kept_out is KeptOut.LAYOUT:
        state.groups.keep_out(group, None)
    return True


def _differing(groups: Groups, group: Group) -> list[Group]:
    """The healthy groups with another layout than ``group``: members of the quorum first, then who came first."""
    layout = group.info.layout
    others = [
        other for other in groups if other.info.layout not in ("", layout) and other.kept_out is not KeptOut.LAYOUT
    ]
    return sorted(others, key=lambda other: (not other.member, other.arrived))


def _deny(state: JobState, group: Group, request: QuorumRequest, reference: Group) -> None:
    state.groups.withdraw(group)
    group.highest_request = max(group.highest_request, request.request)
    if group.kept_out is None:
        state.groups.keep_out(group, KeptOut.LAYOUT)
    if group.session is not None:
        reason = f"the parameters of {group.replica_id} do not fit those of {reference.replica_id}"
        state.tell(group.session, Denied(request.request, "layout", reason, reference.info.address))
        state.log("denied", group.replica_id, code="layout", reason=reason)
