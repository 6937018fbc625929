"""A dead process is known by its closed port. Pure.

A group listens on one port from its first session to the end of its process. A suspect whose port refuses a connection
is lost at once, without the rest of ``reconnect_grace``. A refusal is proof under these conditions only:

* This incarnation has answered at this address, to this lighthouse, in the session that ended. Otherwise something
  else may refuse: a firewall, the proxy of a service, the host of another group.
* The group is still suspect because of the end of that session: it has not reconnected.
* No takeover grace runs: during it no group is judged.
* No group of the job has returned after such a proof. Otherwise something in this network refuses for living groups,
  and the lighthouse looks at no port of this job again.

A connection that is accepted, reset, unreachable, or not answered proves nothing: a forked child can hold the port.
"""

from __future__ import annotations

from urllib.parse import urlsplit

from keepstep_lighthouse.quorum.events import FindPort, PortAnswered, PortRefused, ProbePort
from keepstep_lighthouse.quorum.groups.group import Group, Port
from keepstep_lighthouse.quorum.job_state import JobState
from keepstep_lighthouse.quorum.presence.departures import Departures
from keepstep_lighthouse.quorum.takeover import Takeover
from keepstep_mesh.protocol.names import name_of

MAX_REMEMBERED = 1000
"""Number of groups lost by their port whose return would be noticed; the oldest are dropped."""


class Ports:
    def __init__(self, job: JobState, takeover: Takeover, departures: Departures) -> None:
        self._job, self._takeover, self._departures = job, takeover, departures
        self.lost: dict[str, None] = {}
        """Incarnations that were lost because their port was closed, in this order."""
        self._mislead = False
        """One of them returned."""

    def find(self, group: Group) -> None:
        """The group told its address. Check once a session that it answers there."""
        if group.session is None or not group.host or self._mislead or name_of(group.replica_id) == group.replica_id:
            return
        number = _port_of(group.info.address)
        if number and (group.port is None or (group.port.session, group.port.number) != (group.session, number)):
            group.port = Port(group.session, number)
            self._job.decisions.append(FindPort(group.session, group.replica_id, group.host, number))

    def answered(self, event: PortAnswered) -> None:
        """The group answered at its port."""
        group = self._job.groups.by_session.get(event.session)
        if group is not None and group.port is not None and group.port.session == event.session:
            group.port = group.port._replace(answered=True)

    def probe(self, group: Group, session: int) -> None:
        """The session of the group ended. Look at its port, if a refusal would be proof."""
        if self._is_proof(group, session) and group.port is not None:
            seconds = self._job.record.policy.reconnect_grace
            self._job.decisions.append(ProbePort(session, group.replica_id, group.host, group.port.number, seconds))

    def refused(self, event: PortRefused, now: float) -> None:
        """The port of a group is closed. Lose the group, if that is proof."""
        group = self._job.groups.suspects.get(event.replica_id)
        if group is not None and self._is_proof(group, event.session):
            self.lost[group.replica_id] = None
            while len(self.lost) > MAX_REMEMBERED:
                del self.lost[next(iter(self.lost))]
            self._departures.lose(group, "its connection ended and its port is closed", now)

    def returned(self, replica_id: str) -> None:
        """A group opens a session. If it was lost by its port, the refusal came from something else."""
        if replica_id in self.lost:
            del self.lost[replica_id]
            self._mislead = True
            reason = "its port refused a connection while it lived; the ports of this job's groups prove nothing"
            self._job.log("port_misled", replica_id, reason=reason)

    def _is_proof(self, group: Group, session: int) -> bool:
        if self._mislead or self._takeover.until is not None:
            return False
        return group.port is not None and group.port.answered and group.port.session == session


def _port_of(address: str) -> int:
    """Return the port of ``http://host:port``; 0: it has none."""
    try:
        return urlsplit(address).port or 0
    except ValueError:
        return 0
