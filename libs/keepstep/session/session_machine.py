"""State of a worker's session with the lighthouse. Pure: no clock, randomness, logging or I/O.

1. epoch and quorum_id only grow. The worker refuses a lighthouse with a lower epoch or quorum_id and moves to another
   one; the next ``Hello`` carries the highest values seen.
2. At most one request is open. It is sent again unchanged, with the same number, on every new connection until it is
   answered, denied or withdrawn.
3. A member list belongs to one connection, and is forgotten with it.
4. An answer is held until its step is finished or the next request is made.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from keepstep_mesh.errors import ProtocolError
from keepstep_mesh.protocol import codec
from keepstep_mesh.protocol.membership import HeldAnswer, Member, MemberInfo
from keepstep_mesh.protocol.messages import (
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    Hello,
    Quorum,
    QuorumRequest,
    ShardReport,
    Welcome,
)
from keepstep_mesh.protocol.records import copier, maker

_request_with = copier(QuorumRequest, QuorumRequest, "request", "timeout_ms", "info", "settings", "durable_relays")
_with_list = copier(Quorum, Quorum, "listed")
_make_held = maker(HeldAnswer)


class StaleLighthouseError(ProtocolError):
    """The lighthouse has a lower epoch or quorum_id than this group has seen."""


@dataclass(frozen=True, slots=True)
class About:
    """Facts about a group for its lighthouse, see ``Hello``."""

    host: str = ""
    runtime: str = ""
    groups: int = 0
    standby: bool = False


class SessionCore:
    """State that outlives a connection (``epoch``, ``quorum_id``, ``held``, ``open``), and state that does not."""

    def __init__(
        self, replica_id: str, library: str = "", heartbeat_interval_ms: int = 0, about: About | None = None
    ) -> None:
        self.epoch = 0
        self.quorum_id = 0
        """Highest quorum_id seen; ``epoch``: highest epoch seen."""
        self.held: HeldAnswer | None = None
        self.open: QuorumRequest | None = None
        """The request without an answer, as ``ask`` got it."""
        self.number = 0
        """Number of the latest request."""
        self.shards: ShardReport | None = None
        """The last report of the shards of the group; None: it has none."""
        self._replica_id = replica_id
        self._library = library
        self._about = about or About()
        self.stands_by = self._about.standby
        """Whether the group has been in no quorum, and may wait as a spare."""
        self._heartbeat_interval_ms = heartbeat_interval_ms
        self._checked_info: MemberInfo | None = None
        self._known_info: MemberInfo | None = None
        self._known_settings = ""
        self._known_relays: tuple[str, ...] = ()
        self._listed: tuple[Member, ...] = ()
        self._listed_version: int | None = None

    def hello(self) -> Hello:
        """Return the first message of a new connection, and forget the state of the last connection."""
        self._known_info, self._known_relays = None, ()
        self._listed, self._listed_version = (), None
        return Hello(
            version=PROTOCOL_VERSION,
            oldest_version=OLDEST_PROTOCOL_VERSION,
            replica_id=self._replica_id,
            epoch_seen=self.epoch,
            quorum_id_seen=self.quorum_id,
            held=self.held,
            heartbeat_interval_ms=self._heartbeat_interval_ms,
            library=self._library,
            host=self._about.host,
            runtime=self._about.runtime,
            groups=self._about.groups,
            standby=self.stands_by,
        )

    def welcomed(self, welcome: Welcome) -> None:
        """Apply ``Welcome``. Raises ``VersionError``, ``StaleLighthouseError``."""
        codec.check_welcome(welcome)
        self._refuse_stale(welcome.epoch, self.quorum_id)
        self.epoch = welcome.epoch
        self.quorum_id = max(self.quorum_id, welcome.quorum_id)

    def shards_to_send(self) -> ShardReport | None:
        """Return the report of the shards, for a lighthouse that welcomed the group; None: none."""
        report = self.shards
        if report is not None and report.formed:
            self.shards = replace(report, formed=False)
        return report

    def ask(self, request: QuorumRequest) -> int:
        """Open a request and return its number.

        Raises:
            ProtocolError, TypeError: ``request.info`` is invalid or missing.
        """
        if request.info is None:
            raise ProtocolError("a quorum request without info: set QuorumRequest.info")
        if request.info is not self._checked_info:
            codec.check_info(request.info)
            self._checked_info = request.info
        self.number += 1
        self.held = None
        self.open = request
        return self.number

    def to_send(self, timeout_ms: int) -> QuorumRequest | None:
        """Return the open request without the info and settings that were already sent on this connection."""
        request = self.open
        if request is None:
            return None
        known = request.info is self._known_info or request.info == self._known_info
        known = known and request.settings == self._known_settings
        self._known_info, self._known_settings = request.info, request.settings
        relays = () if request.durable_relays == self._known_relays else request.durable_relays
        self._known_relays = request.durable_relays
        return _request_with(
            request,
            request=self.number,
            timeout_ms=timeout_ms,
            info=None if known else request.info,
            settings="" if known else request.settings,
            durable_relays=relays,
        )

    def withdraw(self, number: int) -> bool:
        """Close a request that was answered, denied or cancelled. Return whether it was open."""
        if self.open is None or self.number != number:
            return False
        self.open = None
        return True

    def answered(self, answer: Quorum) -> Quorum | None:
        """Return the quorum; None if the request of this answer is no longer open.

        Raises ``StaleLighthouseError``, or ``ProtocolError`` if the answer refers to a list that was never sent.
        """
        self._refuse_stale(answer.epoch, answer.quorum_id)
        if not answer.uniform:
            self._listed, self._listed_version = answer.listed, answer.version
        elif answer.version != self._listed_version:
            raise ProtocolError(f"the answer refers to member list {answer.version}, which was not sent here")
        self.epoch, self.quorum_id = answer.epoch, answer.quorum_id
        if not self.withdraw(answer.request):
            return None
        self.stands_by = False
        self.held = _make_held(answer.epoch, answer.quorum_id, answer.step)
        return _with_list(answer, listed=self._listed) if answer.uniform else answer

    def finished_step(self) -> None:
        self.held = None

    def _refuse_stale(self, epoch: int, quorum_id: int) -> None:
        if epoch < self.epoch:
            raise StaleLighthouseError(f"it is at epoch {epoch}; this group has seen epoch {self.epoch}")
        if quorum_id < self.quorum_id:
            raise StaleLighthouseError(f"it announces quorum {quorum_id}; this group has seen quorum {self.quorum_id}")
