"""End of a job's training: its groups leave, and the last one has gone. Pure.

A group that finished (its script ended) differs from one that was drained, stopped, or lost. The job is finished if a
group finished at the step that the job has reached, whatever happened to the other groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from keepstep_lighthouse.quorum.events import LeftOnPurpose
from keepstep_lighthouse.quorum.groups.group import Group
from keepstep_lighthouse.quorum.job_record import JobEnd
from keepstep_lighthouse.quorum.job_state import JobState

FINISHED, FAILED, DRAINED, STOPPED, LEFT = "finished", "failed", "drained", "stopped", "left"
CAUSES = (FINISHED, FAILED, DRAINED, STOPPED)
OLDER_REASONS = {"shutdown": FINISHED, "SIGTERM": STOPPED}
"""Causes by the reason that workers without ``Leave.cause`` send."""


@dataclass(frozen=True, slots=True)
class Parting:
    """How a group leaves on purpose."""

    cause: str
    step: int
    sentence: str

    @property
    def job_code(self) -> str:
        """State of the job if this is its last group."""
        return self.cause if self.cause in (FINISHED, FAILED) else STOPPED


def parting(group: Group, event: LeftOnPurpose) -> Parting:
    """Return how the group leaves, from its message and the orders that it got."""
    step = group.step + (group.working_since is not None) if event.step is None else event.step
    cause = event.cause
    if cause not in CAUSES:
        cause = DRAINED if group.draining is not None else OLDER_REASONS.get(event.reason, LEFT)
    if cause == FINISHED and not step:
        cause = LEFT
    how = f"drained by {group.drained_by}" if cause == DRAINED and group.drained_by else cause
    sentence = f"{how} at step {step}" + ("" if event.reason == "shutdown" else f": {event.reason}")
    return Parting(cause, step, sentence)


def note_parting(state: JobState, group: Group, said: Parting) -> None:
    """A member leaves. Store the highest step at which a group finished."""
    if not group.member:
        return
    state.reached = max(state.reached, said.step)
    if said.cause == FINISHED and said.step > state.record.finished_step:
        state.persist(replace(state.record, finished_step=said.step))


def conclude(state: JobState, now_unix: float) -> None:
    """Store how the job ended, if its last group has gone. No effect before its first quorum."""
    record, last = state.record, state.last_gone
    if last is None or len(state.groups) or state.takeover.until is not None:
        return
    state.last_gone = None
    if record.ended is not None or record.quorum_id == record.first_quorum_id:
        return
    code, why = last
    step = max(state.reached, record.finished_step)
    if state.finished_step:
        code, why = FINISHED, "" if code == FINISHED else why
    state.persist(replace(record, step=step, ended=JobEnd(code, step, now_unix, why)))
    state.log(f"job_{code}", "", step=step, reason=why)
