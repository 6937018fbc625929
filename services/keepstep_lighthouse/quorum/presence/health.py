"""Health: lose the groups that were silent or disconnected for too long. Pure.

A group is healthy while its session is open and its last frame is younger than ``heartbeat_timeout``. A session that
ends without a graceful leave makes the group *suspect*: it may reconnect within ``reconnect_grace`` as if nothing had
happened. (``departures.lose_reported`` loses a suspect at once if most other members of its quorum report it.)

A tick that is late means that frames may be unread, so every group gets ``LATE_TICK_SECONDS`` more.
"""

from __future__ import annotations

from keepstep_lighthouse.quorum.groups.groups import NEVER
from keepstep_lighthouse.quorum.job_state import JobState
from keepstep_lighthouse.quorum.presence.departures import SILENT, Departures
from keepstep_lighthouse.quorum.takeover import Takeover

LATE_TICK_SECONDS = 0.25
"""A tick is late if it comes so long after its deadline."""


class Health:
    def __init__(self, job: JobState, takeover: Takeover, departures: Departures, now: float) -> None:
        self._job, self._takeover, self._departures = job, takeover, departures
        self._beats_counted_from = now
        """When the heartbeat timeout last became shorter: before, workers had a longer heartbeat interval."""

    def deadline(self) -> float:
        """Return when the next group will have been suspect or silent for too long; in a takeover grace, its end."""
        if self._takeover.until is not None:
            return max(self._takeover.until, self._takeover.judged_from)
        policy, groups, due = self._job.record.policy, self._job.groups, NEVER
        for silent in groups.by_session.values():
            due = max(silent.heard_at, self._beats_counted_from) + policy.heartbeat_timeout
            break
        for away in groups.suspects.values():
            due = min(due, away.closed_at + policy.reconnect_grace)
            break
        if self._job.round.left is not None:
            due = min(due, self._job.round.left[0] + policy.heartbeat_timeout)
        return max(due, self._takeover.judged_from)

    def heartbeats_faster(self, now: float) -> None:
        """The heartbeat timeout became shorter. Workers with the longer heartbeat interval are not judged by it."""
        self._beats_counted_from = now

    def check(self, now: float) -> None:
        """Lose the groups whose deadline has passed; at the end of a takeover grace, the absent members."""
        due = self.deadline()
        if now < due:
            return
        if now > due + LATE_TICK_SECONDS:
            self._takeover.judged_from = now + LATE_TICK_SECONDS
        elif self._takeover.until is not None:
            for replica_id in sorted(self._takeover.absent):
                self._departures.give_up_absent(replica_id, "it did not reconnect within takeover_grace", now)
                self._job.groups.sources.silenced(replica_id, now)
            self._takeover.end_grace(now)
        else:
            self._lose_overdue(now)

    def _lose_overdue(self, now: float) -> None:
        policy, groups = self._job.record.policy, self._job.groups
        for group in list(groups.suspects.values()):
            if now < group.closed_at + policy.reconnect_grace:
                break
            reason = f"its connection ended and it did not reconnect within {policy.reconnect_grace:g} s"
            self._departures.lose(group, reason, now)
        for group in list(groups.by_session.values()):
            if now < max(group.heard_at, self._beats_counted_from) + policy.heartbeat_timeout:
                break
            if group.session is not None:
                self._job.end(group.session)
            self._departures.lose(group, f"it was silent for {policy.heartbeat_timeout:g} s", now, SILENT)
            groups.sources.silenced(group.replica_id, now)
        if self._job.round.left is not None and now >= self._job.round.left[0] + policy.heartbeat_timeout:
            _, group = self._job.round.left
            self._job.round.left = None
            reason = f"{group.replica_id} left, so its part of the step may be missing"
            self._job.break_round(reason, group)
