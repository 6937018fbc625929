"""Open a session: of a new group, one that reconnects, or a member that the previous lighthouse answered. Pure."""

from __future__ import annotations

from itertools import islice

from keepstep_lighthouse.quorum.events import Opened
from keepstep_lighthouse.quorum.forming import membership
from keepstep_lighthouse.quorum.groups.group import Group
from keepstep_lighthouse.quorum.job_state import JobState
from keepstep_lighthouse.quorum.presence import bans
from keepstep_lighthouse.quorum.presence.departures import MAX_LOSSES_TOLD, Departures
from keepstep_lighthouse.quorum.presence.ports import Ports
from keepstep_lighthouse.quorum.probation.probation import Probation
from keepstep_lighthouse.quorum.takeover import Takeover
from keepstep_mesh.protocol.membership import HeldAnswer
from keepstep_mesh.protocol.messages import MemberLost, Refused, RoundBroken


class Arrivals:
    def __init__(
        self, job: JobState, takeover: Takeover, probation: Probation, departures: Departures, ports: Ports
    ) -> None:
        self._job, self._takeover, self._probation = job, takeover, probation
        self._departures, self._ports = departures, ports

    def open_session(self, event: Opened, now: float, now_unix: float) -> None:
        """Refuse the session, or add its group to the job; a session that the group had before ends."""
        seen = max(event.quorum_id_seen, event.held.quorum_id if event.held else 0)
        refusal, code = bans.refusal(self._job.record, event.replica_id, now_unix), "banned"
        limit = membership.HIGHEST_QUORUM_ID_SEEN
        if seen > max(limit, self._job.record.quorum_id):
            refusal, code = f"invalid quorum_id {seen} (limit {limit}); restart this group", "bad_message"
        if refusal is not None:
            self._job.tell(event.session, Refused(code, refusal))
            self._job.end(event.session)
            self._job.log("refused", event.replica_id, reason=refusal)
            return
        if seen > self._job.record.quorum_id:
            membership.raise_quorum_id(self._job, seen)
            if self._job.last is None:
                self._takeover.wait((), now)
        group = self._job.groups.by_id.get(event.replica_id)
        if group is None:
            member = event.replica_id in self._job.members
            group = self._job.groups.add(event.replica_id, event.session, now, member=member)
            self._departures.expect_no_longer(group.name)
            if len(self._job.groups) == 1:
                self._job.active_since = now_unix
            if event.standby and not member:
                self._job.groups.stand_by(group)
            self._probation.keep_out(group)
            self._job.log("joined", event.replica_id, member=member)
            self._ports.returned(event.replica_id)
        else:
            if group.session is not None:
                self._job.tell(group.session, Refused("replaced", f"{group.replica_id} opened another session"))
                self._job.end(group.session)
            self._job.groups.connect(group, event.session, now)
        group.host, group.local, group.groups = event.host, event.local, event.groups
        if group.replica_id in self._takeover.absent:
            self._takeover.no_longer_absent(group.replica_id, now)
        if group.draining is not None:
            self._job.tell_to_leave(group)
        if event.held is not None:
            self._check_held(group, event.session, event.held)

    def _check_held(self, group: Group, session: int, held: HeldAnswer) -> None:
        """Tell a group that reconnected with an answer whether that step can still be completed."""
        last, quorum_id = self._job.last, self._job.record.quorum_id
        if held.quorum_id < quorum_id:
            reason = f"quorum {held.quorum_id} is over, the job is at {quorum_id}"
            self._job.tell(session, RoundBroken(held.quorum_id, reason))
        elif self._job.round.lost:
            for replica_id, reason in islice(self._job.round.lost.items(), MAX_LOSSES_TOLD):
                self._job.tell(session, MemberLost(quorum_id, replica_id, reason))
        elif self._job.round.broken and (last is None or held.step == last.step):
            self._job.tell(session, RoundBroken(quorum_id, "the round was broken while the connection was closed"))
        elif last is None:
            self._takeover.holds(group, held.step)
