"""Events and decisions of a job's state machine, one frozen dataclass each.

The state machine holds the state of one job. The shell numbers its sessions, passes events in the order in which they
happened, and carries out decisions in their order: none after a ``Persist`` before that write is known to have
succeeded. A write that fails, or whose outcome is unknown, ends the leader's term.
"""

from __future__ import annotations

from dataclasses import dataclass

from keepstep_lighthouse.quorum.job_record import JobRecord
from keepstep_mesh.protocol.membership import Data, HeldAnswer
from keepstep_mesh.protocol.messages import Healing, Quorum, QuorumRequest, ShardReport, ToWorker
from keepstep_mesh.protocol.policy import Policy
from keepstep_mesh.protocol.stack_messages import RankStacks

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
    host: str = ""
    """Address from which the group connected; empty: unknown."""
    standby: bool = False
    """As in ``Hello``."""
    local: bool = False
    """It connected from an address of the lighthouse's own machine, also if that is not loopback."""


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
class ShardsReported:
    session: int
    told: ShardReport


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
class StacksReported:
    session: int
    found: RankStacks


@dataclass(frozen=True, slots=True)
class StacksOrdered:
    """Ask groups for their stacks. ``target``: as of ``EvictOrdered``; empty: all groups."""

    target: str


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
    | ShardsReported
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
    | StacksReported
    | StacksOrdered
    | Tick
)

# ---- decisions


@dataclass(frozen=True, slots=True)
class Persist:
    record: JobRecord


@dataclass(frozen=True, slots=True)
class Announce(Quorum):
    """Answer these requests with this quorum. The shell adds the epoch, and sends a ``uniform`` quorum without its list
    to the sessions that have ``version``.
    """

    to: tuple[tuple[int, int], ...] = ()
    """(session, request)."""


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
    ``shards`` ``closed``; for one group: ``duplicate_name`` ``max_replicas`` ``multiple`` ``not_in_shrink``
    ``layout`` ``parted`` ``spare`` ``replacing`` ``gone``. ``store``: the store accepts no writes."""
    numbers: dict[str, float]
    sentence: str
