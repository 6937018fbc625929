"""Members and id of the next quorum. Pure.

``quorum_id`` grows by one when the job has no quorum, when the sorted list of members changes, when a member reports
``commit_failures``, when a member was lost since the last round, and when the reference state begins a new history (a
loaded checkpoint). Otherwise the quorum is confirmed under its id. It also grows beyond the lineage of every member,
because states may come from a job of another lighthouse.
"""

from __future__ import annotations

from dataclasses import replace

from keepstep_lighthouse.quorum.groups.group import Group
from keepstep_lighthouse.quorum.job_state import JobState, Round
from keepstep_mesh.protocol.lineage import origin, reference_state, repeats_steps

HIGHEST_QUORUM_ID_SEEN = 2**52
"""A hello with a higher one is invalid, unless the job has reached it. Half of the highest exact number of JSON: the
job goes on after a wrong report.
"""


def change(job: JobState, chosen: list[Group], now_unix: float) -> tuple[int, ...]:
    """Make ``chosen`` the quorum, under a new id if the rules require it, and persist it.

    Returns:
        Sessions of former members that are at work under the previous quorum and are not in this one.
    """
    record = job.record
    left_behind: tuple[int, ...] = ()
    same = len(chosen) == len(record.members) and all(group.member for group in chosen)
    requests = [group.request for group in chosen if group.request is not None]
    failed = {one.commit_failures for one in requests} != {0}
    lineages = {one.lineage for one in requests}
    goes_on = same and not failed and record.ended is None and not job.round.lost
    if goes_on and lineages == {record.quorum_id}:  # in most rounds
        return ()
    known = (origin(lineage).quorum_id for lineage in lineages)
    # above ours if states come from a job of another lighthouse
    reached = max((one for one in known if one <= HIGHEST_QUORUM_ID_SEEN), default=0)
    repeated = any(map(repeats_steps, lineages)) and repeats_steps(reference_state(requests)[1])
    if goes_on and not repeated and reached <= record.quorum_id:
        return ()
    if not same:
        left_behind = job.member_sessions(lambda group: group.request is None)
        job.set_members(chosen)
    members, created_ms = tuple(group.replica_id for group in chosen), int(now_unix * 1000)
    quorum_id = max(record.quorum_id, reached) + 1
    step = max(request.step for request in requests)
    finished_step = record.finished_step if record.ended is None else 0
    diverged = tuple(one for one in record.diverged if one.replica_id in job.groups.by_id)
    begun = replace(record, step=step, finished_step=finished_step, ended=None, diverged=diverged)
    job.persist(replace(begun, quorum_id=quorum_id, members=members, created_ms=created_ms))
    return left_behind


def raise_quorum_id(job: JobState, seen: int) -> None:
    """A hello reports ``seen``, so the store is older than the job, and the members of that quorum are unknown."""
    job.set_members([])
    job.round = Round()
    job.persist(replace(job.record, quorum_id=seen, members=(), created_ms=0))
    job.log("quorum_id_raised", "", quorum_id=seen)
