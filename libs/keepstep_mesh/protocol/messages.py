"""Every message of a lighthouse session, one frozen dataclass each.

On the wire a message is a msgpack array: its kind, then its fields in the order written here. Fields are only ever
appended, with a default, so that a newer peer can talk to an older one; whatever breaks that rule raises
``PROTOCOL_VERSION``. ``keepstep_mesh.protocol.codec`` turns messages into frames and back and checks every field.

Workers open a session with ``Hello`` and must have had ``Welcome`` before anything else is answered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from keepstep_mesh.protocol.membership import HeldAnswer, Lineage, Member, MemberInfo, StateRoot

PROTOCOL_VERSION = 2
"""What this build speaks. 2: ``Timing`` and ``Services``, sent to workers that speak it."""
OLDEST_PROTOCOL_VERSION = 1
"""The oldest version that this build still understands."""

MAX_HEAL_ERROR = 1000
"""Characters of ``Healing.error`` that are told."""

Detail = str | float | bool | None
"""What a service may say of itself."""


# ---- worker to lighthouse


@dataclass(frozen=True, slots=True)
class Hello:
    """Opens a session. ``epoch_seen`` and ``quorum_id_seen`` are the highest that the group ever met (0: none)."""

    kind: ClassVar[str] = "hello"
    version: int
    oldest_version: int
    replica_id: str
    epoch_seen: int = 0
    quorum_id_seen: int = 0
    held: HeldAnswer | None = None
    heartbeat_interval_ms: int = 0
    """What the worker was told to use; 0 leaves it to the lighthouse."""
    library: str = ""
    """Name and version of the client, for people."""


@dataclass(frozen=True, slots=True)
class QuorumRequest:
    """The group is ready for the next step. Resent as it is (same ``request``) after a reconnect."""

    kind: ClassVar[str] = "ask"
    request: int
    """Grows with every new request of this incarnation."""
    step: int
    lineage: Lineage
    shrink_only: bool
    commit_failures: int
    timeout_ms: int
    """How long from now the asker waits."""
    info: MemberInfo | None = None
    """None: as in the request before on this session."""
    root: StateRoot | None = None
    """When the answer before asked for it, and the group held the reference state."""
    batches_committed: int = 0
    """At that step."""
    allow_heal: bool = True
    """False: nobody is to heal in this round."""
    settings: str = ""
    """Sent with ``info``: what decides the group's arithmetic, one line ``name value`` a setting; empty: unknown."""


@dataclass(frozen=True, slots=True)
class CancelRequest:
    kind: ClassVar[str] = "cancel"
    request: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    kind: ClassVar[str] = "beat"


@dataclass(frozen=True, slots=True)
class Healing:
    """A heal at work: of one rank within its group, of the whole group to the lighthouse. The next request ends it."""

    kind: ClassVar[str] = "healing"
    bytes_done: int
    bytes_total: int
    """0: not known yet."""
    bytes_per_second: float
    """Over the last seconds; once it has ended, on average."""
    step: int = 0
    """Whose state is taken over."""
    source: str = ""
    """replica_id that it comes from; empty: not known."""
    via: str = ""
    """``CheckpointTransport.via``."""
    seconds: float = 0.0
    """Since it began."""
    ended: bool = False
    error: str = ""
    """Why it failed; empty, once it has ended: it did not."""

    @property
    def seconds_left(self) -> float | None:
        """At this rate; None: not known."""
        if not self.bytes_total or self.bytes_per_second < 1:
            return None
        return max(0, self.bytes_total - self.bytes_done) / self.bytes_per_second


@dataclass(frozen=True, slots=True)
class Leave:
    """Leaving on purpose; answered with ``Goodbye``. Never sent in the middle of a step."""

    kind: ClassVar[str] = "leave"
    reason: str


@dataclass(frozen=True, slots=True)
class Moved:
    """The group goes on with another lighthouse; not a loss."""

    kind: ClassVar[str] = "moved"


@dataclass(frozen=True, slots=True)
class Failed:
    """Rank 0 says that its group is lost as a whole (one of its ranks died)."""

    kind: ClassVar[str] = "failed"
    reason: str


# ---- lighthouse to worker


@dataclass(frozen=True, slots=True)
class ServiceAddress:
    """Where a service listens that registered with the lighthouse."""

    service: str
    """``relay`` or ``metrics``."""
    name: str
    address: str
    """``http://host:port``."""


@dataclass(frozen=True, slots=True)
class Welcome:
    kind: ClassVar[str] = "welcome"
    version: int
    epoch: int
    quorum_id: int
    heartbeat_interval_ms: int
    heartbeat_timeout_ms: int
    reconnect_grace_ms: int
    lighthouse: str = ""
    """Who answers, for people."""
    services: tuple[ServiceAddress, ...] = ()
    """Sorted by service and name."""
    heal_timeout_ms: int = 0
    """How long the next quorum waits for a group that heals; 0: not told."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The job's policy changed: from now on these hold instead of the welcome's. Travels within a group too."""

    kind: ClassVar[str] = "timing"
    heartbeat_interval_ms: int
    """0: as before, or the worker's own."""
    heartbeat_timeout_ms: int
    reconnect_grace_ms: int
    heal_timeout_ms: int = 0


@dataclass(frozen=True, slots=True)
class Services:
    """All services that are known now, instead of those told before. Travels within a group too."""

    kind: ClassVar[str] = "services"
    services: tuple[ServiceAddress, ...]


@dataclass(frozen=True, slots=True)
class QuorumAnswer:
    """The quorum for the coming step. ``members`` is None when the list is the one last sent on this session."""

    kind: ClassVar[str] = "quorum"
    request: int
    epoch: int
    quorum_id: int
    created_ms: int
    """Unix time of the formation of this quorum_id."""
    version: int
    """Number of the member list within the epoch."""
    step: int
    """With ``members`` None every member stands at (``step``, ``lineage``); else the reference state's."""
    lineage: Lineage
    joiners: int
    """Groups that are there and not in this quorum."""
    members: tuple[Member, ...] | None
    """Sorted by replica_id."""
    verify: bool = False
    """Who holds the reference state is to say its root digest with the next request."""
    allow_heal: bool = True
    """False: a member allows no healing, so nobody heals and every member takes part as it is."""


@dataclass(frozen=True, slots=True)
class Denied:
    """The request got no quorum. ``code`` is one of ``DENIALS``; ``reason`` is a sentence for people."""

    kind: ClassVar[str] = "denied"
    request: int
    code: str
    reason: str
    peer_address: str = ""
    """With code ``layout``: the group server whose parameters the job has; empty: ``reason`` names the difference."""


DENIALS = ("deadline", "layout", "cancelled", "superseded")


@dataclass(frozen=True, slots=True)
class MemberLost:
    kind: ClassVar[str] = "member_lost"
    quorum_id: int
    replica_id: str
    reason: str


@dataclass(frozen=True, slots=True)
class RoundBroken:
    """The answer held under this quorum_id did not reach every member: abort and ask again."""

    kind: ClassVar[str] = "round_broken"
    quorum_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Finish the step, leave, exit 0."""

    kind: ClassVar[str] = "drain"
    reason: str


@dataclass(frozen=True, slots=True)
class Evicted:
    kind: ClassVar[str] = "evicted"
    reason: str
    ban_seconds: float


@dataclass(frozen=True, slots=True)
class NotLeader:
    kind: ClassVar[str] = "not_leader"
    leader: str
    """Address of the leader, empty while there is none."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The session is refused and closed. ``code`` is one of ``REFUSALS``; retrying helps only for ``not_ready``."""

    kind: ClassVar[str] = "refused"
    code: str
    reason: str


REFUSALS = ("version_too_old", "version_too_new", "bad_message", "banned", "replaced", "not_ready")


@dataclass(frozen=True, slots=True)
class Goodbye:
    """Answers ``Leave``: the group counts nowhere any more."""

    kind: ClassVar[str] = "bye"


ToLighthouse = Hello | QuorumRequest | CancelRequest | Heartbeat | Healing | Leave | Moved | Failed
ToWorker = (
    Welcome
    | Timing
    | Services
    | QuorumAnswer
    | Denied
    | MemberLost
    | RoundBroken
    | Drain
    | Evicted
    | NotLeader
    | Refused
    | Goodbye
)
