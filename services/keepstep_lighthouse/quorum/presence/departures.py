"""Departures of groups, the messages that follow, and the end of the job when the last group has gone. Pure.

* **Messages.** When a group is lost, every live member of its quorum gets ``MemberLost``, and so does a member that
  reconnects later while it holds that quorum's answer. ``leave`` and ``moved`` are not losses: no message, no wait.
* **Losses.** A launcher starts a lost group again, so the others wait for it at the end of training. A group that was
  evicted, drained, or stopped by a signal does not come back soon. Not stored: a lighthouse that takes over knows the
  members of the quorum that did not reconnect.
* **The end.** A group that finished (its script ended) differs from one that was drained, stopped, or lost. The job is
  finished if a group finished at the step that the job has reached, whatever happened to the other groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from keepstep_lighthouse.quorum import heals
from keepstep_lighthouse.quorum.agreement.step_reports import StepReports
from keepstep_lighthouse.quorum.events import LeftOnPurpose
from keepstep_lighthouse.quorum.groups.group import Group
from keepstep_lighthouse.quorum.job_record import JobEnd
from keepstep_lighthouse.quorum.job_state import JobState
from keepstep_lighthouse.quorum.probation.probation import Probation
from keepstep_lighthouse.quorum.takeover import Takeover
from keepstep_lighthouse.quorum.views.replicas import Gone, gone_view
from keepstep_mesh.protocol.messages import Goodbye, MemberLost
from keepstep_mesh.protocol.names import name_of

FINISHED, FAILED, DRAINED, STOPPED, LEFT = "finished", "failed", "drained", "stopped", "left"
SILENT, CLOSED, BROKEN, HUNG, EVICTED = "silent", "closed", "broken", "hung", "evicted"
"""How a group is lost: no frame arrives, its connection ended, it says so itself, it hangs, an order."""
CAUSES = (FINISHED, FAILED, DRAINED, STOPPED)
OLDER_REASONS = {"shutdown": FINISHED, "SIGTERM": STOPPED}
"""Causes by the reason that workers without ``Leave.cause`` send."""
MAX_LOSSES_TOLD = 16
"""Number of ``MemberLost`` for one quorum; its members drop the step after the first."""
MAX_REMEMBERED = 1000
"""Number of lost groups whose return is expected."""


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


class Departures:
    def __init__(self, job: JobState, takeover: Takeover, probation: Probation, reports: StepReports) -> None:
        self._job, self._takeover, self._probation, self._reports = job, takeover, probation, reports
        self.gone = Gone()
        self.last_gone: tuple[str, str] | None = None
        """The group that went last: what follows for the job (``JobEnd.code``), and why it went."""
        self._lost_at: dict[str, float] = {}
        """When groups were lost, by name."""

    def leave(self, group: Group, event: LeftOnPurpose, now: float) -> None:
        """The group leaves on purpose. Write the step at which it finished, then send its Goodbye."""
        said = _parting(group, event)
        self._note_finish(group, said)
        self._job.tell(event.session, Goodbye())
        if said.cause == FAILED:
            self._expect(group.name, now)
            self._count(group.replica_id, draining=group.draining is not None)
            self._probation.lost_while_healing(group, said.sentence, now)
        self._part(group, said.sentence, said.job_code, now)
        self._job.log("left", group.replica_id, reason=event.reason, cause=said.cause, step=said.step)

    def move(self, group: Group, now: float) -> None:
        """The group continues with another lighthouse."""
        reason = "continues with another lighthouse"
        self._part(group, reason, STOPPED, now)
        self._job.log("moved", group.replica_id, reason=reason)

    def _part(self, group: Group, sentence: str, job_code: str, now: float) -> None:
        """The group leaves on purpose, which is not a loss."""
        if group.session is not None:
            self._job.end(group.session)
        self._forget(group, sentence, now)
        self._went(job_code, f"{group.replica_id} {sentence}", member=group.member)
        if group.member and self._job.round.left is None:
            self._job.round.left = now, group

    def lose(self, group: Group, reason: str, now: float, how: str = CLOSED) -> None:
        """The group is lost. The caller ends its session, if it has one. ``how``: one of the words above."""
        if group.excluded is None:
            self._expect(group.name, now)
        self._count(group.replica_id, draining=group.draining is not None)
        self._probation.lost_while_healing(group, reason, now)
        self._forget(group, reason, now)
        self._went(FAILED, f"{group.replica_id} was lost: {reason}", member=group.member)
        self._job.log("lost", group.replica_id, reason=reason, member=group.member, how=how)
        if group.member:
            self._tell_lost(group.replica_id, reason)

    def lose_reported(self, now: float) -> None:
        """Lose suspects at once, without further grace, when most other members of their quorum report it broken."""
        suspects = self._job.groups.suspects
        if not suspects:
            return
        members = len(self._job.members)
        if 2 * len(self._job.round.reports) < members or self._takeover.until is not None:
            return
        for group in list(suspects.values()):
            if group.member and self._job.round.is_given_up_by_most(group.replica_id, members):
                self.lose(group, "its connection ended and most of its quorum report it as lost", now)

    def give_up_absent(self, replica_id: str, reason: str, now: float, how: str = CLOSED) -> None:
        """A member of the quorum that was found in the store is lost without having reconnected."""
        self._expect(name_of(replica_id), now)
        self._count(replica_id)
        self._job.round.reports.add(replica_id)
        self._went(FAILED, f"{replica_id} was lost: {reason}", member=True)
        self._job.log("lost", replica_id, reason=reason, member=True, how=how)
        self._tell_lost(replica_id, reason)

    # ---- losses

    def expected(self, now: float) -> dict[str, float]:
        """Return when the groups were lost that are waited for, by name."""
        since = now - self._job.record.policy.finish_grace
        here = self._job.groups.by_name
        return {name: lost for name, lost in self._lost_at.items() if lost > since and name not in here}

    def expect_no_longer(self, name: str) -> None:
        """The group of this name has returned, or is not to return."""
        self._lost_at.pop(name, None)

    def expect_none(self) -> None:
        """The lost groups were replaced."""
        self._lost_at.clear()

    def _expect(self, name: str, now: float) -> None:
        """The group of this name was lost, or its script failed."""
        waited_for = self.expected(now)
        self._lost_at = {one: lost for one, lost in self._lost_at.items() if one in waited_for}
        if len(self._lost_at) < MAX_REMEMBERED:
            self._lost_at[name] = now

    def _count(self, replica_id: str, *, draining: bool = False) -> None:
        """Count the loss if it is a failure: the group has trained, no order told it to leave, the job is not over."""
        record = self._job.record
        ordered = draining or replica_id in record.evicted
        over = record.closed is not None or record.ended is not None
        if name_of(replica_id) in self._job.were_members and not ordered and not over:
            self._job.groups.tally.failures += 1

    def _tell_lost(self, replica_id: str, reason: str) -> None:
        self._job.round.broken = True
        self._job.round.lost[replica_id] = reason
        self._takeover.forget_answers()
        if len(self._job.round.lost) > MAX_LOSSES_TOLD:
            return
        if sessions := self._job.member_sessions(lambda _: True):
            self._job.tell_all(sessions, MemberLost(self._job.record.quorum_id, replica_id, reason))

    def _forget(self, group: Group, reason: str, now: float) -> None:
        heals.end(self._job, group, reason)
        self.gone.add(gone_view(group, self._job.groups, self._job.record, now, reason), now)
        self._job.groups.remove(group)
        self._reports.forget(group.replica_id)
        self._takeover.is_gone(group)
        if group.member:
            self._job.round.reports.add(group.replica_id)

    # ---- the end of the job

    def conclude(self, now_unix: float) -> None:
        """Store how the job ended, if its last group has gone. No effect before its first quorum."""
        record, last = self._job.record, self.last_gone
        if last is None or len(self._job.groups) or self._takeover.until is not None:
            return
        self.last_gone = None
        if record.ended is not None or record.quorum_id == record.first_quorum_id:
            return
        code, why = last
        step = max(self._job.reached, record.finished_step)
        if self._job.finished_step:
            code, why = FINISHED, "" if code == FINISHED else why
        self._job.persist(replace(record, step=step, ended=JobEnd(code, step, now_unix, why)))
        self._job.log(f"job_{code}", "", step=step, reason=why)

    def _went(self, job_code: str, why: str, *, member: bool) -> None:
        """Note what follows for the job if no group is left. A group that never trained says little about it."""
        if member or self.last_gone is None:
            self.last_gone = job_code, why

    def _note_finish(self, group: Group, said: Parting) -> None:
        """A member leaves. Store the highest step at which a group finished."""
        if not group.member:
            return
        self._job.reached = max(self._job.reached, said.step)
        if said.cause == FINISHED and said.step > self._job.record.finished_step:
            self._job.persist(replace(self._job.record, finished_step=said.step))


def _parting(group: Group, event: LeftOnPurpose) -> Parting:
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
