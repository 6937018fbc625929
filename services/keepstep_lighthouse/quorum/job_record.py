"""The stored state of one job: its policy, its members, orders on its groups, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field

from keepstep_mesh.protocol.membership import FinalState
from keepstep_mesh.protocol.policy import Policy


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


WEIGHTS, VALUES = "weights", "values"
"""Values of ``Divergence.what``."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """A group had to heal because it differed from the others: the first time, while it is connected."""

    replica_id: str
    what: str
    """``weights``, or the ``values`` with which its optimizers stepped."""
    quorum_id: int
    step: int
    """Step after which the weights differed, or before which the optimizers stepped."""


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
    diverged: tuple[Divergence, ...] = ()
    """Groups that had to heal because they differed; they are refused if they differ again."""
    longest_step: float = 0.0
    """Seconds, roughly: of the last steps. The next lighthouse learns from it when a group hangs. 0: unknown."""
