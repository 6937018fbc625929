"""State of one checkpoint at a relay. Only ``machine`` changes it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from keepstep_mesh.telemetry.throughput import ThroughputMeter
from keepstep_relay.core.events import Cause, Facts, Key, RefusedError, State, Table, UploadEnded

NEVER = float("inf")
MAX_ENDED = 1000
"""Deleted checkpoints whose reason is remembered."""


@dataclass(slots=True)
class Holder:
    """A process that serves chunks of a rank to other processes."""

    address: str
    bitmap: bytes
    until: float
    """When it is forgotten, unless it reports again."""


@dataclass(slots=True)
class Checkpoint:
    key: Key
    facts: Facts
    began: float
    heard: dict[int, float] = field(default_factory=dict)
    """Last sign of life of each rank that has not reported; a rank without one is absent."""
    roots: dict[int, dict[str, bytes]] = field(default_factory=dict)
    """Root digests of each rank, by producer. The first one counts, unless the table has arrived."""
    layouts: dict[int, bytes] = field(default_factory=dict)
    """Digest of the layout of each rank that reported one."""
    tables: dict[int, Table] = field(default_factory=dict)
    missing: dict[int, int] = field(default_factory=dict)
    """Number of distinct chunks of each table that are not here."""
    reported: set[int] = field(default_factory=set)
    """Ranks that reported success."""
    part: bool = False
    """A rank that reported has chunks at other relays."""
    holders: dict[tuple[int, str], Holder] = field(default_factory=dict)
    """By rank and name."""
    arrived: bool = False
    """A chunk arrived since the checkpoint began."""
    sealing: bool = False
    committed_at: float | None = None
    copied: bool = False
    """The durable tier has all of it."""
    replaced: bool = False
    """A later version is committed; this one is kept for those who read it."""
    read_until: float = -NEVER
    """Until then it counts as being read."""
    came_bytes: int = 0
    """Bytes of arrived chunks."""
    came_at: float = field(init=False)
    """When the last chunk arrived; before the first chunk, when the checkpoint began."""
    throughput: ThroughputMeter = field(init=False)
    """Rate of ``came_bytes``."""

    def __post_init__(self) -> None:
        self.throughput = ThroughputMeter(self.began)
        self.came_at = self.began

    def check_rank(self, rank: int) -> None:
        """Raise ``RefusedError`` unless the checkpoint has this rank."""
        if not 0 <= rank < self.facts.ranks:
            raise RefusedError(Cause.CONFLICT, f"{self.key} has no rank {rank}: expected 0 to {self.facts.ranks - 1}")

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
        """Whether all ranks reported, and the rest of the chunks is at other relays."""
        return self.part and len(self.reported) == self.facts.ranks and self.committed_at is None and not self.sealing

    @property
    def complete(self) -> bool:
        return self.why_incomplete() is None

    def why_incomplete(self) -> str | None:
        """Return why it cannot be committed; None if it can."""
        if self.facts.stays_open:
            return f"{self.key} is open, and never committed: upload its content as another checkpoint"
        if len(self.tables) < self.facts.ranks:
            first = next(rank for rank in range(self.facts.ranks) if rank not in self.tables)
            absent = self.facts.ranks - len(self.tables)
            return f"{self.key} is incomplete: {absent} missing manifests of {self.facts.ranks}, first of rank {first}"
        if any(self.missing.values()):
            return f"{self.key} is incomplete: {sum(self.missing.values())} missing chunks"
        if self.facts.one_producer and not self._whole_producers():
            return (
                f"{self.key} is incomplete: no producer has reported the states of all its ranks as they are stored; "
                f"either another rank has to report, or the states of the producers differ"
            )
        return None

    def _whole_producers(self) -> set[str]:
        """Return the producers whose root digest counts for every rank."""
        roots = ((self.root(rank), self.roots.get(rank, {})) for rank in range(self.facts.ranks))
        return set.intersection(*({name for name, root in known.items() if root == counts} for counts, known in roots))

    @property
    def longest_silent_since(self) -> float:
        """Earliest last sign of life of the ranks that have not reported; ``NEVER`` if all have."""
        unheard = len(self.heard) + len(self.reported) < self.facts.ranks
        return min([*self.heard.values(), *([self.began] if unheard else [])], default=NEVER)

    def silent_since(self, then: float) -> Iterator[int]:
        """Iterate over the ranks that have not reported and gave no sign of life after ``then``."""
        for rank in range(self.facts.ranks):
            if rank not in self.reported and self.heard.get(rank, self.began) <= then:
                yield rank

    def ended(self, missing_bytes: int, error: str = "") -> UploadEnded:
        """Return the decision to report the end of the upload, before the checkpoint is deleted or at its commit."""
        total = sum(table.pack_bytes for table in self.tables.values())
        seconds = self.came_at - self.began
        rate = self.came_bytes / seconds if seconds else 0.0
        committed = self.committed_at is not None
        return UploadEnded(self.key, self.facts, committed, error, total, total - missing_bytes, rate, self.came_at)

    def root(self, rank: int) -> bytes | None:
        """Return the root digest that counts; None: no producer reported one."""
        if (table := self.tables.get(rank)) is not None:
            return table.root
        return next(iter(self.roots.get(rank, {}).values()), None)

    def digests(self) -> list[bytes]:
        """Return the distinct digests of all tables, in their order."""
        return list(dict.fromkeys(digest for table in self.tables.values() for digest in table.digests))


@dataclass(frozen=True, slots=True)
class Ended:
    """A deleted checkpoint."""

    reason: str
    state: State | None
    """``COMMITTED``: it was kept for a time. None: a part that was not read, or beyond the count at its commit."""
    absent: int = 0
    """Bits of the ranks that had not begun when another one failed, and have not got the reason."""
    at: float = 0.0
