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
from keepstep_lighthouse.quorum.presence import departures
from keepstep_mesh.protocol.names import name_of

MAX_REMEMBERED = 1000
"""Number of groups lost by their port whose return would be noticed; the oldest are dropped."""


def find(state: JobState, group: Group) -> None:
    """The group told its address. Check once a session that it answers there."""
    if group.session is None or not group.host or state.ports_mislead or name_of(group.replica_id) == group.replica_id:
        return
    number = _port_of(group.info.address)
    if number and (group.port is None or (group.port.session, group.port.number) != (group.session, number)):
        group.port = Port(group.session, number)
        state.decisions.append(FindPort(group.session, group.replica_id, group.host, number))


def answered(state: JobState, event: PortAnswered) -> None:
    """The group answered at its port."""
    group = state.groups.by_session.get(event.session)
    if group is not None and group.port is not None and group.port.session == event.session:
        group.port = group.port._replace(answered=True)


def probe(state: JobState, group: Group, session: int) -> None:
    """The session of the group ended. Look at its port, if a refusal would be proof."""
    if _is_proof(state, group, session) and group.port is not None:
        seconds = state.record.policy.reconnect_grace
        state.decisions.append(ProbePort(session, group.replica_id, group.host, group.port.number, seconds))


def refused(state: JobState, event: PortRefused, now: float) -> None:
    """The port of a group is closed. Lose the group, if that is proof."""
    group = state.groups.suspects.get(event.replica_id)
    if group is not None and _is_proof(state, group, event.session):
        state.lost_by_port[group.replica_id] = None
        while len(state.lost_by_port) > MAX_REMEMBERED:
            del state.lost_by_port[next(iter(state.lost_by_port))]
        departures.lose(state, group, "its connection ended and its port is closed", now)


def returned(state: JobState, replica_id: str) -> None:
    """A group opens a session. If it was lost by its port, the refusal came from something else."""
    if replica_id in state.lost_by_port:
        del state.lost_by_port[replica_id]
        state.ports_mislead = True
        reason = "its port refused a connection while it lived; the ports of this job's groups prove nothing"
        state.log("port_misled", replica_id, reason=reason)


def _is_proof(state: JobState, group: Group, session: int) -> bool:
    if state.ports_mislead or state.takeover.until is not None:
        return False
    return group.port is not None and group.port.answered and group.port.session == session


def _port_of(address: str) -> int:
    """Return the port of ``http://host:port``; 0: it has none."""
    try:
        return urlsplit(address).port or 0
    except ValueError:
        return 0
