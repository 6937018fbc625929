"""State of a job for operators: whether it runs, and if not, how it ended. Pure.

* ``running``: groups train.
* ``standing``: groups are connected, and no quorum has formed for ``JOB_STANDS_SECONDS``, or longer with slow steps.
* ``finishing``: groups have taken their last step, and wait for the others.
* ``closed``: all groups finished together, at ``step``.
* ``finished``: the scripts of its groups ended, at ``step``.
* ``failed``: its last group was lost, or its script ended with an error.
* ``stopped``: its last group was drained, got a signal, or left for another reason before its script ended.
* ``abandoned``: as failed or stopped, and no group has trained for ``ABANDONED_SECONDS``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from keepstep_lighthouse.quorum.events import Reason
from keepstep_lighthouse.quorum.groups.groups import Groups
from keepstep_lighthouse.quorum.job_record import JobRecord
from keepstep_lighthouse.quorum.views import reasons

JOB_STANDS_SECONDS = 5.0
ABANDONED_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class JobStatus:
    """State of a job, see the head of this file."""

    code: str
    """``running``, ``standing``, ``finishing``, ``closed``, ``finished``, ``failed``, ``stopped`` or ``abandoned``."""
    step: int
    """Steps that the job has committed, as far as the lighthouse knows."""
    since: float
    """Unix seconds."""
    why: str
    """One sentence, or empty. While the job stands or finishes: what the next quorum waits for."""


def begins_to_run(groups: Groups, now: float) -> bool:
    """Return whether a quorum that forms now makes the job run: it stood, or none of its groups is a member."""
    trains = groups.members_asking > 0 or any(group.member for group in groups)
    return not trains or _stands(groups, now)


def of_job(
    groups: Groups, record: JobRecord, reached: int, active_since: float, waits: Reason, now: float, now_unix: float
) -> JobStatus:
    """Return the state of the job.

    Args:
        reached: highest step that the groups are known to have committed.
        active_since: when the first group came, or the first quorum formed after a long wait; Unix seconds.
        waits: why the next quorum is not formed.
    """
    step = max(reached, record.step)
    if (closed := record.closed) is not None:
        return JobStatus("closed", closed.step, closed.closed_ms / 1000, reasons.closed(closed).sentence)
    if groups.final:
        step = max(step, *(group.step for group in groups.all_asking()))
        return JobStatus("finishing", step, now_unix - groups.waited(now), waits.sentence)
    finished = record.ended is not None and record.ended.code == "finished"
    if len(groups) and (groups.asking_count or not finished):  # a group that only connects does not change a finish
        if any(group.member for group in groups) and not _stands(groups, now):
            return JobStatus("running", step, active_since, "")
        asked = now_unix - groups.waited(now)
        return JobStatus("standing", step, max(active_since, asked), waits.sentence)
    if waits.code == "takeover_grace":
        return JobStatus("standing", step, active_since, waits.sentence)
    if (ended := record.ended) is None:
        return JobStatus("abandoned", step, active_since, "no group has trained")
    status = JobStatus(ended.code, ended.step, ended.at, ended.why)
    if ended.code != "finished" and now_unix - ended.at > ABANDONED_SECONDS:
        return replace(status, code="abandoned")
    return status


def _stands(groups: Groups, now: float) -> bool:
    """Return whether groups wait longer for the next quorum than different speeds of the groups explain."""
    waited = groups.waited(now)
    return waited > JOB_STANDS_SECONDS and waited > 2 * max(group.step_seconds or 0.0 for group in groups)
