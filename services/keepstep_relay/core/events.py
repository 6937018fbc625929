"""Events and decisions of a relay's state machine. Plain data; digests are bytes. Times are seconds."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from keepstep_mesh.protocol.manifest import chunk_count, chunk_length


class Key(NamedTuple):
    """Names one version of a checkpoint. A save that overwrites makes the next version."""

    job: str
    id: str
    """``NAME`` of version 0, else ``NAME~VERSION``. No name has a tilde."""

    def __str__(self) -> str:
        return f"checkpoint {self.id} of job {self.job}"

    @property
    def name(self) -> str:
        return self.id.partition("~")[0]

    @property
    def version(self) -> int:
        return int(self.id.partition("~")[2] or 0)

    def at(self, version: int) -> Key:
        """Return another version of the checkpoint."""
        return Key(self.job, f"{self.name}~{version}" if version else self.name)


class Kind(enum.Enum):
    LIVE = "live"
    """For healing; useful until the next one."""
    DURABLE = "durable"
    """For a restart of the whole job."""


class State(enum.Enum):
    BEGUN = "begun"
    """The chunk table of a rank is missing."""
    PLANNED = "planned"
    """All tables are here; no chunk arrived since."""
    UPLOADING = "uploading"
    PART = "part"
    """This relay's share is here; other relays have the rest. Not committed."""
    COMMITTED = "committed"
    ABORTED = "aborted"


class Tier(enum.Enum):
    MEMORY = "memory"
    DISK = "disk"
    DURABLE = "durable"


class Cause(enum.Enum):
    """Kind of a refusal."""

    UNKNOWN = "unknown"
    CONFLICT = "conflict"
    GONE = "gone"
    FULL = "full"


class RefusedError(Exception):
    """The core refuses an event; nothing has changed."""

    def __init__(self, cause: Cause, reason: str) -> None:
        super().__init__(reason)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class Table:
    """The chunks of one rank's pack."""

    root: bytes
    """Root digest of its manifest."""
    pack_bytes: int
    digests: tuple[bytes, ...]

    def __post_init__(self) -> None:
        if len(self.digests) != chunk_count(self.pack_bytes):
            raise ValueError(f"{len(self.digests)} digests do not fit a pack of {self.pack_bytes} bytes")

    def length(self, chunk: int) -> int:
        """Return the bytes of chunk number ``chunk``."""
        return chunk_length(self.pack_bytes, chunk)


@dataclass(frozen=True, slots=True)
class Facts:
    """Properties of a checkpoint, fixed when it begins."""

    step: int
    kind: Kind
    ranks: int
    """Processes; each stores one pack."""
    quorum_id: int = 0
    one_producer: bool = False
    """Commit only if one producer reported the root digest that counts for every rank."""
    stays_open: bool = False
    """Never commit: the checkpoint lives as long as its ranks give signs of life."""

    def __str__(self) -> str:
        more = (", one_producer" if self.one_producer else "") + (", open" if self.stays_open else "")
        return f"step {self.step}, kind {self.kind.value}, ranks {self.ranks}, quorum_id {self.quorum_id}{more}"

    @property
    def of_manager(self) -> bool:
        """Whether a quorum committed the step. A script that calls ``keepstep.checkpoint.save`` has no quorum_id."""
        return self.quorum_id > 0

    @property
    def age_order(self) -> tuple[int, int]:
        """Sort key: a checkpoint is newer than another if it is later in the job's history."""
        return self.quorum_id, self.step


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the whole relay, unless a field says otherwise. For ``keep_*`` and ages, 0 means no limit."""

    checkpoints: int = 1000
    chunks: int = 1_000_000
    ranks: int = 4096
    """Per checkpoint."""
    producers: int = 1000
    """Producers of one rank's root digest."""
    holders: int = 1000
    """Per checkpoint."""
    upload_seconds: float = 60.0
    """Abort an upload whose rank is silent for this time."""
    reading_seconds: float = 60.0
    """Do not drop a checkpoint that was read within this time."""
    holder_seconds: float = 30.0
    """Forget a holder that is silent for this time."""
    keep_live: int = 2
    """Committed live checkpoints to keep per job."""
    keep_durable: int = 0
    durable_seconds: float = 0.0
    """Drop a committed durable checkpoint at this age, unless it is the newest of its job."""
    live_ttl_seconds: float = 86400.0
    """Drop the newest live checkpoint of a job too, if it was unused for this time: the job is over."""
    durable_ttl_seconds: float = 0.0
    """Drop the durable checkpoints of a job that was unused for this time, except those that a script saved itself."""


# ---- events


@dataclass(frozen=True, slots=True)
class Begun:
    key: Key
    facts: Facts
    rank: int | None = None
    """The rank that begins; None: the request does not name it."""
    again: bool = True
    """Whether to begin a checkpoint that was deleted."""


@dataclass(frozen=True, slots=True)
class RootReported:
    """``producer`` has a state with this root digest for ``rank``. The first root of a rank counts."""

    key: Key
    rank: int
    producer: str
    root: bytes


@dataclass(frozen=True, slots=True)
class LayoutReported:
    """A rank holds what its layout describes. ``digest``: of the layout, equal for equal layouts."""

    key: Key
    rank: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class RankWaits:
    """A rank waits for the layouts of others, or for the commit: a sign of life."""

    key: Key
    rank: int


@dataclass(frozen=True, slots=True)
class TableArrived:
    key: Key
    rank: int
    table: Table


@dataclass(frozen=True, slots=True)
class ChunkArrived:
    """A verified chunk is in ``tier``; not used for the durable tier, which has ``Copied``."""

    digest: bytes
    tier: Tier


@dataclass(frozen=True, slots=True)
class ChunkLost:
    """``tier`` does not have the chunk any more: evicted, damaged or deleted."""

    digest: bytes
    tier: Tier


@dataclass(frozen=True, slots=True)
class Copied:
    """The durable tier has a full copy of the checkpoint, which is deleted with it."""

    key: Key


@dataclass(frozen=True, slots=True)
class RankReported:
    """A rank's upload ended. ``error`` None: it succeeded; ``part``: some of its chunks are at other relays."""

    key: Key
    rank: int
    error: str | None = None
    part: bool = False


@dataclass(frozen=True, slots=True)
class CommitAsked:
    key: Key


@dataclass(frozen=True, slots=True)
class Sealed:
    """``Seal`` was carried out."""

    key: Key


@dataclass(frozen=True, slots=True)
class SealFailed:
    key: Key


@dataclass(frozen=True, slots=True)
class Aborted:
    key: Key
    reason: str


@dataclass(frozen=True, slots=True)
class Removed:
    key: Key
    reason: str


@dataclass(frozen=True, slots=True)
class ReadFrom:
    """A client reads this checkpoint."""

    key: Key


@dataclass(frozen=True, slots=True)
class ChunkHeld:
    """A reader began to hold a chunk; ``ChunkReleased`` follows."""

    digest: bytes


@dataclass(frozen=True, slots=True)
class ChunkReleased:
    digest: bytes


@dataclass(frozen=True, slots=True)
class HolderReported:
    """A process serves chunks. ``bitmap``: bit ``i % 8`` of byte ``i // 8``, lowest first, is chunk i of the rank."""

    key: Key
    rank: int
    name: str
    address: str
    bitmap: bytes


@dataclass(frozen=True, slots=True)
class MemoryWanted:
    """Free ``size`` bytes of memory, as far as possible."""

    size: int


@dataclass(frozen=True, slots=True)
class DiskFull:
    """A write found the disk full: drop a live state, if one is unused."""


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Event = (
    Begun
    | RootReported
    | LayoutReported
    | RankWaits
    | TableArrived
    | ChunkArrived
    | ChunkLost
    | Copied
    | RankReported
    | CommitAsked
    | Sealed
    | SealFailed
    | Aborted
    | Removed
    | ReadFrom
    | ChunkHeld
    | ChunkReleased
    | HolderReported
    | MemoryWanted
    | DiskFull
    | Tick
)

# ---- decisions


@dataclass(frozen=True, slots=True)
class Keep:
    """Write the record of a new checkpoint to disk before the request is answered."""

    key: Key


@dataclass(frozen=True, slots=True)
class TooLate:
    """Refuse a ``Begun``, which changes nothing: the checkpoint ended before this rank began."""

    reason: str


@dataclass(frozen=True, slots=True)
class Seal:
    """Sync these chunks, the manifests and the record of the commit to disk; then send ``Sealed``."""

    key: Key
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Forget:
    """Delete the record and the manifests of a checkpoint."""

    key: Key
    reason: str


@dataclass(frozen=True, slots=True)
class UploadEnded:
    """Report the end of an upload. For an aborted one it precedes ``Forget``."""

    key: Key
    facts: Facts
    committed: bool
    error: str
    """Empty also for a part, and for a live state whose ranks became silent: it served its time."""
    bytes_total: int
    bytes_done: int
    """Bytes that are here, from any process."""
    bytes_per_second: float
    """Average from the begin to the last chunk."""
    came_at: float
    """When the last chunk arrived; without a chunk, when the upload began."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Delete these unused chunks from every tier."""

    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Evict:
    """Free the memory of these chunks; another tier has them."""

    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Wake:
    """Notify the requests that wait for these checkpoints and chunks."""

    what: tuple[Key | bytes, ...]


Decision = Keep | TooLate | Seal | UploadEnded | Forget | Drop | Evict | Wake
