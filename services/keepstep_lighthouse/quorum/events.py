"""What the quorum core is told and what it answers: one frozen dataclass each, no I/O.

The core holds the state of one job. The shell numbers its sessions, feeds events in the order in which they happened
and carries out decisions in the order in which they stand: nothing after a ``Persist`` is done before that write is
known to have succeeded. A write that fails, or whose outcome is unknown, ends the leader's term.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from keepstep_mesh.protocol.membership import Data, HeldAnswer, Member
from keepstep_mesh.protocol.messages import Healing, QuorumRequest, ToWorker

# ---- events


@dataclass(frozen=True, slots=True)
class Opened:
    """A hello was accepted by the shell (token, version, epoch). ``session`` is unique within this process."""

    session: int
    replica_id: str
    quorum_id_seen: int = 0
    held: HeldAnswer | None = None


@dataclass(frozen=True, slots=True)
class Closed:
    """The connection ended without ``leave``, ``moved`` or ``failed``."""

    session: int


@dataclass(frozen=True, slots=True)
class Heard:
    """A frame that says nothing but "I live". Every other event of a session says so too."""

    session: int


@dataclass(frozen=True, slots=True)
class Asked:
    session: int
    request: QuorumRequest


@dataclass(frozen=True, slots=True)
class Cancelled:
    session: int
    request: int


@dataclass(frozen=True, slots=True)
class HealProgress:
    session: int
    told: Healing


@dataclass(frozen=True, slots=True)
class LeftOnPurpose:
    session: int
    reason: str


@dataclass(frozen=True, slots=True)
class MovedAway:
    session: int


@dataclass(frozen=True, slots=True)
class GroupFailed:
    session: int
    reason: str


@dataclass(frozen=True, slots=True)
class EvictOrdered:
    """``target`` is a stable name or one incarnation, here and in the next two."""

    target: str
    reason: str
    ban_seconds: float
    by: str


@dataclass(frozen=True, slots=True)
class DrainOrdered:
    target: str
    reason: str
    by: str


@dataclass(frozen=True, slots=True)
class ReadmitOrdered:
    """Lifts a ban or eviction."""

    target: str
    by: str


@dataclass(frozen=True, slots=True)
class PolicyOrdered:
    policy: Policy
    by: str


@dataclass(frozen=True, slots=True)
class VerifyOrdered:
    """Compare the root digests of the groups' states once."""

    by: str


@dataclass(frozen=True, slots=True)
class StragglerFound:
    """The metrics service finds this incarnation to be slower than the others."""

    replica_id: str
    steps: int
    """Committed in a row as a straggler."""
    seconds: float
    """What it needs itself for a step."""
    median_seconds: float
    """Over the groups."""
    by: str


@dataclass(frozen=True, slots=True)
class Tick:
    """The deadline that the core named has passed. Harmless at any other time."""


Event = (
    Opened
    | Closed
    | Heard
    | Asked
    | Cancelled
    | HealProgress
    | LeftOnPurpose
    | MovedAway
    | GroupFailed
    | EvictOrdered
    | DrainOrdered
    | ReadmitOrdered
    | PolicyOrdered
    | VerifyOrdered
    | StragglerFound
    | Tick
)

# ---- what is stored


@dataclass(frozen=True, slots=True)
class Policy:
    """Of one job; times in seconds."""

    min_replicas: int = 1
    max_replicas: int = 0
    """0: no limit."""
    join_timeout: float = 60.0
    heal_timeout: float = 60.0
    heartbeat_timeout: float = 5.0
    reconnect_grace: float = 0.2
    takeover_grace: float | None = None
    """None: the heartbeat timeout."""
    initial_replicas: int = 0
    """Groups that the first quorum of the job waits for, up to ``join_timeout`` and half of the time that those wait
    that ask. Later ones do not."""
    verify_every: int = 0
    """Root digests are compared at each step that this divides; 0: only when ordered."""
    on_divergence: str = "heal"
    """What becomes of a group whose root is not the majority's. ``heal``: it takes over the state of another;
    ``drain``: that too, and then it leaves; ``report``: nothing."""
    drain_straggler_after: int = 0
    """Steps in a row that the metrics service finds a group to be a straggler, and then it is drained; 0: never."""
    job_ttl: float = 7 * 86400.0
    """Time after which a job without sessions is deleted; 0: never."""


@dataclass(frozen=True, slots=True)
class Ban:
    """``until`` in Unix seconds, so that it outlives a restart; ``target`` as ordered."""

    target: str
    until: float
    reason: str


@dataclass(frozen=True, slots=True)
class JobRecord:
    """What must survive the lighthouse. Written only when it changes, never for an unchanged quorum."""

    quorum_id: int = 0
    members: tuple[str, ...] = ()
    """replica_ids of the quorum, sorted; empty before the first."""
    created_ms: int = 0
    policy: Policy = field(default_factory=Policy)
    bans: tuple[Ban, ...] = ()
    evicted: tuple[str, ...] = ()
    """Incarnations that may not come back."""
    first_quorum_id: int = 0
    """quorum_id with which the job was created: above those of every job that was deleted before."""


# ---- decisions


@dataclass(frozen=True, slots=True)
class Persist:
    record: JobRecord


@dataclass(frozen=True, slots=True)
class Announce:
    """Answer these requests with this quorum. The shell sends ``members`` only to sessions whose last list differs."""

    to: tuple[tuple[int, int], ...]
    """(session, request)."""
    quorum_id: int
    created_ms: int
    version: int
    """Number of the member list; grows whenever anything in it but a common step and lineage changed."""
    step: int
    lineage: int | str
    joiners: int
    listed: tuple[Member, ...]
    """The members, sorted by replica_id, as they were when ``version`` began."""
    uniform: bool
    """All members stand at (step, lineage), no commit failure and no shrink_only, so who knows ``version`` needs no
    list. A list that is not uniform is never left out."""
    verify: bool = False
    """Who stands at (step, lineage) is to say its root digest with the next request."""
    allow_heal: bool = True
    """False: a member allows no healing, so nobody heals in this round."""

    @property
    def members(self) -> tuple[Member, ...]:
        """The members with their facts of this round. O(members): for sessions that need the list."""
        if not self.uniform:
            return self.listed
        return tuple(Member(m.replica_id, self.step, self.lineage, 0, False, m.info) for m in self.listed)


@dataclass(frozen=True, slots=True)
class Tell:
    """Push or answer one message to some sessions."""

    to: tuple[int, ...]
    message: ToWorker


@dataclass(frozen=True, slots=True)
class EndSession:
    """Close the connection after what was told. The core has forgotten this session: no ``Closed`` is expected."""

    session: int


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One entry of the job's event log; the shell numbers and dates it."""

    kind: str
    replica_id: str
    detail: dict[str, Data]


Decision = Persist | Announce | Tell | EndSession | LogEntry


# ---- reasons


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a quorum is formed or not yet. The same object feeds /quorum, --explain, logs, denials and tests."""

    code: str
    """announced: ``fast`` ``all_asking`` ``stragglers_dropped``; waiting: ``nobody`` ``takeover_grace``
    ``min_replicas`` ``initial_replicas`` ``majority`` ``stragglers`` ``healing``; for one group: ``duplicate_name``
    ``max_replicas`` ``not_in_shrink`` ``layout`` ``gone``."""
    numbers: dict[str, float]
    sentence: str
