"""Make the announcement of a quorum: member list, its version, the reference state."""

from __future__ import annotations

from typing import Protocol

from keepstep_lighthouse.quorum.events import Announce
from keepstep_lighthouse.quorum.groups.group import Group
from keepstep_lighthouse.quorum.job_state import JobState
from keepstep_mesh.protocol.lineage import (
    BEHIND,
    DIVERGED,
    LOADED,
    Soundness,
    is_live,
    is_loaded,
    reference_state,
    soundness,
)
from keepstep_mesh.protocol.membership import Lineage, Member
from keepstep_mesh.protocol.messages import QuorumRequest
from keepstep_mesh.protocol.records import maker

_make_announce = maker(Announce)


class Compares(Protocol):
    """Return whether the groups compare their weights in a round.

    Args:
        step: of the round.
        equal: number of members that hold the reference state.
        allow_heal: whether a group that differs may heal in the round.
        same_members: whether the members are those of the round before.
        all_equal: whether all members hold the reference state.
    """

    def __call__(self, step: int, equal: int, *, allow_heal: bool, same_members: bool, all_equal: bool) -> bool: ...


class Announcer:
    """Number member lists, so that a list is sent only when it has changed.

    A round is without healing for all members if one of them asked for that, except where groups finish: no member
    takes a step there with the state that it has.

    A list is *uniform* when all members are at one (step, lineage), none after a failed commit and none with
    shrink_only. Between two uniform rounds with the same members and infos, only the common step and lineage change,
    and the version stays. Every other round makes a new version.
    """

    def __init__(self, job: JobState) -> None:
        self._job = job
        self._chosen: list[Group] = []
        """Groups of the last announcement, sorted by replica_id."""
        self._info_changed = False
        """Whether the info of one of them changed since then."""

    def info_changed(self) -> None:
        """The info of a member changed, so its list needs another version."""
        self._info_changed = True

    def announce(self, chosen: list[Group], joiners: int, compares: Compares, differ: str = "") -> Announce:
        """Announce ``chosen``, which all ask, as the quorum of the job's record.

        Args:
            compares: says whether the groups compare their weights. Called once.
            differ: as in ``Quorum``.
        """
        record, last, same_members = self._job.record, self._job.last, chosen == self._chosen
        same = not self._info_changed and same_members
        asked = [(group, group.request) for group in chosen if group.request is not None]
        _, first = asked[0]
        step, lineage = first.step, first.lineage
        uniform, allow_heal, finishing = True, True, False
        for group, request in asked:
            differs = request.step != step or request.lineage != lineage or group.diverged
            if differs or request.commit_failures or request.shrink_only:
                uniform = False
            if not request.allow_heal:
                allow_heal = False
            if request.final:
                finishing = True
        if last is not None and last.uniform and uniform and same:
            listed, version = last.listed, last.version
        else:
            listed = members_of(chosen)
            version = 1 if last is None else last.version + 1
            if not uniform:
                step, lineage = reference_state(listed)
        equal = len(chosen) if uniform else sum(_holds(one, step, lineage) for one in listed)
        to = tuple([(-1 if group.session is None else group.session, request.request) for group, request in asked])
        verify = not finishing and compares(
            step, equal, allow_heal=allow_heal, same_members=same_members, all_equal=equal == len(chosen)
        )
        announce = _make_announce(
            to=to,
            request=0,
            epoch=0,
            quorum_id=record.quorum_id,
            created_ms=record.created_ms,
            version=version,
            step=step,
            lineage=lineage,
            joiners=joiners,
            listed=listed,
            uniform=uniform,
            verify=verify,
            allow_heal=allow_heal or finishing,
            went_back_from=self._job.reached if step < self._job.reached else 0,
            finishing=finishing,
            differ=differ,
        )
        if last is not None and step > last.step:
            self._job.proven = self._chosen
        self._chosen, self._info_changed, self._job.last = chosen, False, announce
        return announce


def members_of(chosen: list[Group]) -> tuple[Member, ...]:
    """Return the members of a quorum of ``chosen``, which all ask."""
    behind = _highest_behind(chosen)
    return tuple(_member(group, group.request, behind) for group in chosen if group.request is not None)


def _member(group: Group, said: QuorumRequest, behind: int) -> Member:
    lineage, batches = _lineage(group, said, behind), said.batches_committed
    return Member(group.replica_id, said.step, lineage, said.commit_failures, said.shrink_only, group.info, batches)


def _lineage(group: Group, request: QuorumRequest, behind: int) -> Lineage:
    """Return the lineage that counts in the quorum. ``behind``: see ``_highest_behind``."""
    if group.diverged:
        return f"{DIVERGED}{group.replica_id}"
    if request.step <= behind and not group.trained and is_loaded(request.lineage):
        return f"{LOADED}{BEHIND}{group.replica_id}"
    return request.lineage


def _highest_behind(chosen: list[Group]) -> int:
    """Return the highest step of the groups that took part without healing, if these are all that have trained; else 0.

    The job goes on from them then: a checkpoint from which no step was committed takes it to no lower step.
    """
    highest = 0
    for group in chosen:
        if is_live(group.step, group.lineage):
            return 0
        if soundness(group.step, group.lineage) is Soundness.BEHIND and not is_loaded(group.lineage):
            highest = max(highest, group.step)
    return highest


def _holds(member: Member, step: int, lineage: Lineage) -> bool:
    return (member.step, member.lineage) == (step, lineage)
