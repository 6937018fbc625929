"""Events and decisions of a job's state machine, one frozen dataclass each.

The state machine holds the state of one job. The shell numbers its sessions, passes events in the order in which they
happened, and carries out decisions in their order: none after a ``Persist`` before that write is known to have
succeeded. A write that fails, or whose outcome is unknown, ends the leader's term.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from keepstep_mesh.protocol.membership import Data, FinalState, HeldAnswer, Member
from keepstep_mesh.protocol.messages import PROTOCOL_VERSION, Healing, QuorumRequest, ToWorker

# ---- events


@dataclass(frozen=True, slots=True)
class Opened:
    """A hello was accepted by the shell (token, version, epoch). ``session`` is unique within this process."""

    session: int
    replica_id: str
    quorum_id_seen: int = 0
    held: HeldAnswer | None = None
    groups: int = 0
    """Number of groups of the job, as this one knows it; 0: unknown."""
    version: int = PROTOCOL_VERSION
    """Version of the protocol that the group speaks."""
    host: str = ""
    """Address from which the group connected; empty: unknown."""
    standby: bool = False
    """As in ``Hello``."""


@dataclass(frozen=True, slots=True)
class Closed:
    """The connection ended without ``leave``, ``moved`` or ``failed``."""

    session: int


@dataclass(frozen=True, slots=True)
class PortAnswered:
    """The incarnation of this session answered at the port of a ``FindPort``."""

    session: int


@dataclass(frozen=True, slots=True)
class PortRefused:
    """The port of a ``ProbePort`` refused the connection."""

    session: int
    replica_id: str


@dataclass(frozen=True, slots=True)
class Heard:
    """A heartbeat. Every other event of a session counts as one too."""

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
    cause: str = ""
    """As in ``Leave``."""
    step: int | None = None
    """Steps that the group has committed; None: unknown."""


@dataclass(frozen=True, slots=True)
class MovedAway:
    session: int


@dataclass(frozen=True, slots=True)
class GroupFailed:
    session: int
    reason: str


@dataclass(frozen=True, slots=True)
class EvictOrdered:
    """An operator evicts a group. ``target``: a stable name or one incarnation, also in the two orders below."""

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
class ReplaceOrdered:
    """Let a spare in; drain the target when the spare has committed a step."""

    target: str
    reason: str
    by: str


@dataclass(frozen=True, slots=True)
class ReadmitOrdered:
    """Lift a ban or an eviction."""

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
class ReopenOrdered:
    """Let the groups of a closed job train on."""

    by: str


@dataclass(frozen=True, slots=True)
class StragglerFound:
    """The metrics service reports that this incarnation is slower than the others."""

    replica_id: str
    steps: int
    """Consecutive committed steps in which it was a straggler."""
    seconds: float
    """Its own time for a step, without waiting for others."""
    median_seconds: float
    """Median of that time over all groups."""
    by: str


@dataclass(frozen=True, slots=True)
class Tick:
    """The deadline of the state machine has passed. Harmless at any other time."""


Event = (
    Opened
    | Closed
    | PortAnswered
    | PortRefused
    | Heard
    | Asked
    | Cancelled
    | HealProgress
    | LeftOnPurpose
    | MovedAway
    | GroupFailed
    | EvictOrdered
    | DrainOrdered
    | ReplaceOrdered
    | ReadmitOrdered
    | PolicyOrdered
    | VerifyOrdered
    | ReopenOrdered
    | StragglerFound
    | Tick
)

# ---- what is stored


@dataclass(frozen=True, slots=True)
class Policy:
    """Policy of one job; times in seconds."""

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
    """Number of groups that the first quorum of the job waits for, up to ``join_timeout`` and up to half of the time
    limit of the open requests; 0: the number that the groups tell. A later quorum waits for it only with
    ``refuse_going_back``, after the loss of all members."""
    verify_every: int = 1000
    """Compare root digests at each step that is a multiple of this, before the first one at the steps 10 and 100, and
    when a group has caught up; 0: only when ordered."""
    on_divergence: str = "heal"
    """Action for a group whose root digest differs from the majority's. ``heal``: it receives the state of another
    group; ``drain``: it heals and then leaves; ``report``: none."""
    drain_straggler_after: int = 0
    """Drain a group that was a straggler for so many consecutive steps; 0: never."""
    refuse_going_back: bool = False
    """Deny a quorum more than one step below the step that the job has reached."""
    job_ttl: float = 7 * 86400.0
    """Time after which a job without sessions is deleted; 0: never."""
    finish_grace: float = 30.0
    """Time for which groups that have finished wait for the return of a group that was lost."""


@dataclass(frozen=True, slots=True)
class Ban:
    """``until``: Unix seconds, so that it survives a restart; ``target``: as ordered."""

    target: str
    until: float
    reason: str


@dataclass(frozen=True, slots=True)
class Replacement:
    """An order to replace a group, until the group has left."""

    replica_id: str
    reason: str
    by: str


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How the last group of a job went."""

    code: str
    """``finished``, ``failed`` or ``stopped``, see ``JobStatus``."""
    step: int
    at: float
    """Unix seconds."""
    why: str
    """One sentence, or empty."""


@dataclass(frozen=True, slots=True)
class JobRecord:
    """State of a job that survives the lighthouse. Written only when it changes, not for a confirmed quorum."""

    quorum_id: int = 0
    members: tuple[str, ...] = ()
    """replica_ids of the quorum, sorted; empty before the first."""
    created_ms: int = 0
    policy: Policy = field(default_factory=Policy)
    bans: tuple[Ban, ...] = ()
    evicted: tuple[str, ...] = ()
    """Incarnations that may not reconnect."""
    first_quorum_id: int = 0
    """quorum_id with which the job was created: above those of all jobs deleted earlier."""
    step: int = 0
    """Step of the job when the record was written; the job may have advanced since."""
    finished_step: int = 0
    """The highest step at which a group finished since the job was last started; 0: none did."""
    ended: JobEnd | None = None
    """How the last group went; None: groups train, or the job has not begun."""
    closed: FinalState | None = None
    """State at which all groups finished. No group trains on until an administrator reopens the job. None: open."""
    durable_relays: tuple[str, ...] = ()
    """Names of the relays that committed the newest durable checkpoint, as a group last reported; empty: none did."""
    replacing: tuple[Replacement, ...] = ()
    """Groups that a spare replaces, in the order of the orders."""


# ---- decisions


@dataclass(frozen=True, slots=True)
class Persist:
    record: JobRecord


@dataclass(frozen=True, slots=True)
class Announce:
    """Answer these requests with this quorum. The shell sends ``members`` only to sessions that have another list."""

    to: tuple[tuple[int, int], ...]
    """(session, request)."""
    quorum_id: int
    created_ms: int
    version: int
    """Number of the member list; grows when anything in it except a common step and lineage changes."""
    step: int
    lineage: int | str
    joiners: int
    listed: tuple[Member, ...]
    """The members, sorted by replica_id, as they were when ``version`` began."""
    uniform: bool
    """All members are at (step, lineage), without commit failure and shrink_only, so that a session that has
    ``version`` needs no list. A list that is not uniform is always sent."""
    verify: bool = False
    """Members at (step, lineage) send their root digest with the next request."""
    allow_heal: bool = True
    """False: a member asked for a round without healing, so no group heals in it."""
    went_back_from: int = 0
    """Step that the job had reached, if this quorum begins at an earlier one; else 0."""
    finishing: bool = False
    """As in ``QuorumAnswer``."""

    @property
    def members(self) -> tuple[Member, ...]:
        """The members with their values of this round. O(members): for sessions that need the list."""
        if not self.uniform:
            return self.listed
        return tuple(Member(m.replica_id, self.step, self.lineage, 0, False, m.info) for m in self.listed)


@dataclass(frozen=True, slots=True)
class Tell:
    """Send one message to some sessions."""

    to: tuple[int, ...]
    message: ToWorker


@dataclass(frozen=True, slots=True)
class EndSession:
    """Close the connection after the messages sent so far. The shell reports no ``Closed`` for it."""

    session: int


@dataclass(frozen=True, slots=True)
class FindPort:
    """Ask who serves this port. ``PortAnswered`` if it is this incarnation; otherwise nothing."""

    session: int
    replica_id: str
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class ProbePort:
    """Connect to this port, several times within ``seconds``. ``PortRefused`` if it refuses; otherwise nothing."""

    session: int
    """The session that ended."""
    replica_id: str
    host: str
    port: int
    seconds: float


@dataclass(frozen=True, slots=True)
class LogEntry:
    """One entry of the job's event log; the shell numbers and dates it."""

    kind: str
    replica_id: str
    detail: dict[str, Data]


Decision = Persist | Announce | Tell | EndSession | FindPort | ProbePort | LogEntry


# ---- reasons


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a quorum is formed or not. Shown by ``/quorum``, ``--explain``, logs, denials and tests."""

    code: str
    """announced: ``fast`` ``all_asking`` ``stragglers_dropped``; waiting: ``nobody`` ``takeover_grace``
    ``min_replicas`` ``initial_replicas`` ``majority`` ``stragglers`` ``grace`` ``healing`` ``finish_grace``
    ``closed``; for one group: ``duplicate_name`` ``max_replicas`` ``not_in_shrink`` ``layout`` ``parted``
    ``spare`` ``replacing`` ``gone``."""
    numbers: dict[str, float]
    sentence: str
