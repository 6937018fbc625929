"""What a relay knows of a checkpoint, of a chunk, and of who else holds it. Only ``core`` changes it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from keepstep_mesh.telemetry.throughput import ThroughputMeter
from keepstep_relay.core.events import Facts, Key, State, Table, Tier, UploadEnded

NEVER = float("inf")
MAX_ENDED = 1000
"""Checkpoints that are gone and of which it is still known why."""


@dataclass(slots=True)
class Chunk:
    """Lives while a table names it, or somebody reads it."""

    length: int
    users: set[tuple[Key, int]] = field(default_factory=set)
    """(checkpoint, rank) whose table names it."""
    tiers: set[Tier] = field(default_factory=set)
    readers: int = 0


@dataclass(slots=True)
class Holder:
    """A process that serves chunks which it has."""

    address: str
    bitmap: bytes
    until: float


@dataclass(slots=True)
class Checkpoint:
    key: Key
    facts: Facts
    began: float
    heard: dict[int, float] = field(default_factory=dict)
    """When each rank last gave a sign of life, until it has reported; one that is not here gave none yet."""
    roots: dict[int, dict[str, bytes]] = field(default_factory=dict)
    """Of each rank, by producer; the first one counts unless a table is here."""
    tables: dict[int, Table] = field(default_factory=dict)
    lacking: dict[int, int] = field(default_factory=dict)
    """Different chunks of each table that are not here."""
    reported: set[int] = field(default_factory=set)
    part: bool = False
    """A rank that has reported has chunks at other relays."""
    holders: dict[tuple[int, str], Holder] = field(default_factory=dict)
    arrived: bool = False
    sealing: bool = False
    committed_at: float | None = None
    copied: bool = False
    """All of it is in the durable tier."""
    read_until: float = -NEVER
    came_bytes: int = 0
    """Of chunks that its tables waited for."""
    came_at: float = field(init=False)
    """When the last of them did, or else the beginning."""
    pace: ThroughputMeter = field(init=False)
    """Of ``came_bytes``."""

    def __post_init__(self) -> None:
        self.pace = ThroughputMeter(self.began)
        self.came_at = self.began

    @property
    def state(self) -> State:
        if self.committed_at is not None:
            return State.COMMITTED
        if self.is_part:
            return State.PART
        if len(self.tables) < self.facts.ranks:
            return State.BEGUN
        return State.UPLOADING if self.arrived else State.PLANNED

    @property
    def is_part(self) -> bool:
        """Nothing more comes, and it cannot be committed here."""
        return self.part and len(self.reported) == self.facts.ranks and self.committed_at is None and not self.sealing

    @property
    def complete(self) -> bool:
        return len(self.tables) == self.facts.ranks and not any(self.lacking.values())

    @property
    def longest_silent_since(self) -> float:
        """Of the ranks that have not reported; ``NEVER`` when all have."""
        unheard = len(self.heard) + len(self.reported) < self.facts.ranks
        return min([*self.heard.values(), *([self.began] if unheard else [])], default=NEVER)

    def silent_since(self, then: float) -> Iterator[int]:
        """The ranks that have not reported and gave no sign of life after ``then``."""
        for rank in range(self.facts.ranks):
            if rank not in self.reported and self.heard.get(rank, self.began) <= then:
                yield rank

    def ended(self, lacking_bytes: int, error: str = "") -> UploadEnded:
        """Of one that is about to be forgotten, or that is committed now. ``lacking_bytes``: that are not here."""
        total = sum(table.pack_bytes for table in self.tables.values())
        seconds = self.came_at - self.began
        rate = self.came_bytes / seconds if seconds else 0.0
        committed = self.committed_at is not None
        return UploadEnded(self.key, self.facts, committed, error, total, total - lacking_bytes, rate, self.came_at)

    def root(self, rank: int) -> bytes | None:
        """The one that counts."""
        if (table := self.tables.get(rank)) is not None:
            return table.root
        return next(iter(self.roots.get(rank, {}).values()), None)

    def chunks(self) -> Iterator[tuple[bytes, int]]:
        """(digest, length) of all tables."""
        for table in self.tables.values():
            for number, digest in enumerate(table.digests):
                yield digest, table.length(number)


@dataclass(frozen=True, slots=True)
class Ended:
    """A checkpoint that is no more."""

    reason: str
    state: State | None
    """``ABORTED``, or None for one that was committed and dropped."""
