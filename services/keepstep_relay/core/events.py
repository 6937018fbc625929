"""What the core of a relay is told, and what it decides. Plain data; digests are bytes."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

from keepstep_mesh.protocol.manifest import chunk_count, chunk_length


class Key(NamedTuple):
    """Which checkpoint."""

    job: str
    id: str

    def __str__(self) -> str:
        return f"checkpoint {self.id} of job {self.job}"


class Kind(enum.Enum):
    LIVE = "live"
    """For healing: of use until the next one."""
    DURABLE = "durable"
    """To go on from after everything was lost."""


class State(enum.Enum):
    BEGUN = "begun"
    """The chunk table of some rank is not here yet."""
    PLANNED = "planned"
    """All tables are here; no chunk came since."""
    UPLOADING = "uploading"
    PART = "part"
    """All that comes to this relay is here; others have the rest, and nobody has committed it."""
    COMMITTED = "committed"
    ABORTED = "aborted"


class Tier(enum.Enum):
    MEMORY = "memory"
    DISK = "disk"
    DURABLE = "durable"


class Cause(enum.Enum):
    """Why something is refused."""

    UNKNOWN = "unknown"
    CONFLICT = "conflict"
    GONE = "gone"
    FULL = "full"


class RefusedError(Exception):
    """The core says no; nothing has changed."""

    def __init__(self, cause: Cause, reason: str) -> None:
        super().__init__(reason)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class Table:
    """The chunks of one rank's pack."""

    root: bytes
    """Root digest of the manifest that it is from."""
    pack_bytes: int
    digests: tuple[bytes, ...]

    def __post_init__(self) -> None:
        if len(self.digests) != chunk_count(self.pack_bytes):
            raise ValueError(f"{len(self.digests)} digests do not fit a pack of {self.pack_bytes} bytes")

    def length(self, chunk: int) -> int:
        """Bytes of chunk number ``chunk``."""
        return chunk_length(self.pack_bytes, chunk)


@dataclass(frozen=True, slots=True)
class Facts:
    """What is said of a checkpoint when it begins."""

    step: int
    kind: Kind
    ranks: int
    """Processes that each store one pack."""
    quorum_id: int = 0


@dataclass(frozen=True, slots=True)
class Limits:
    """Counts are of the whole relay unless they say otherwise; times are seconds. Of what is kept, 0: no limit."""

    checkpoints: int = 1000
    chunks: int = 1_000_000
    ranks: int = 4096
    """Of one checkpoint."""
    producers: int = 1000
    """That report the root of one rank."""
    holders: int = 1000
    """Of one checkpoint."""
    upload_seconds: float = 60.0
    """An upload of which a rank says nothing for so long is aborted."""
    reading_seconds: float = 60.0
    """A checkpoint that was read from so recently is not dropped."""
    holder_seconds: float = 30.0
    """A holder that says nothing for so long is forgotten."""
    keep_live: int = 2
    """Committed live checkpoints of each job that are kept; 0: all."""
    keep_durable: int = 0
    live_seconds: float = 0.0
    """Age at which a committed live checkpoint is dropped, unless it is the newest of its job."""
    durable_seconds: float = 0.0
    live_ttl_seconds: float = 86400.0
    """The newest live checkpoint of a job is dropped too when nobody used it for so long: the job is over."""


# ---- events


@dataclass(frozen=True, slots=True)
class Begun:
    key: Key
    facts: Facts


@dataclass(frozen=True, slots=True)
class RootSaid:
    """``producer`` has this state for ``rank``. The first root of a rank is the one that counts."""

    key: Key
    rank: int
    producer: str
    root: bytes


@dataclass(frozen=True, slots=True)
class TableCame:
    key: Key
    rank: int
    table: Table


@dataclass(frozen=True, slots=True)
class ChunkCame:
    """A verified chunk is in ``tier``. Of the durable tier ``Copied`` says so."""

    digest: bytes
    tier: Tier


@dataclass(frozen=True, slots=True)
class ChunkLost:
    """It is not, or no longer, in ``tier``: evicted, damaged, deleted."""

    digest: bytes
    tier: Tier


@dataclass(frozen=True, slots=True)
class Copied:
    """The durable tier has all of this checkpoint, in a copy of its own that is deleted with it."""

    key: Key


@dataclass(frozen=True, slots=True)
class RankReported:
    """``error`` None: all that this rank has to store is stored; ``part``: here, or at other relays."""

    key: Key
    rank: int
    error: str | None = None
    part: bool = False


@dataclass(frozen=True, slots=True)
class CommitAsked:
    key: Key


@dataclass(frozen=True, slots=True)
class Sealed:
    """What ``Seal`` asked for is done."""

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
    """Somebody takes over this checkpoint."""

    key: Key


@dataclass(frozen=True, slots=True)
class ChunkTaken:
    """A reader of one chunk began. Each is followed by ``ChunkLetGo``."""

    digest: bytes


@dataclass(frozen=True, slots=True)
class ChunkLetGo:
    digest: bytes


@dataclass(frozen=True, slots=True)
class HolderSaid:
    """``bitmap``: bit i of byte i // 8, the lowest first, is chunk i of the rank's pack."""

    key: Key
    rank: int
    name: str
    address: str
    bitmap: bytes


@dataclass(frozen=True, slots=True)
class RoomWanted:
    """``size`` bytes of memory are to be freed, as far as that is possible."""

    size: int


@dataclass(frozen=True, slots=True)
class Tick:
    pass


Event = (
    Begun
    | RootSaid
    | TableCame
    | ChunkCame
    | ChunkLost
    | Copied
    | RankReported
    | CommitAsked
    | Sealed
    | SealFailed
    | Aborted
    | Removed
    | ReadFrom
    | ChunkTaken
    | ChunkLetGo
    | HolderSaid
    | RoomWanted
    | Tick
)

# ---- decisions


@dataclass(frozen=True, slots=True)
class Keep:
    """Write down that the checkpoint has begun, before anybody is answered."""

    key: Key


@dataclass(frozen=True, slots=True)
class Seal:
    """Make sure that these chunks, the manifests and the mark of the commit outlast a crash; then say ``Sealed``."""

    key: Key
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Forget:
    """Delete what was written down of the checkpoint."""

    key: Key
    reason: str


@dataclass(frozen=True, slots=True)
class UploadEnded:
    """Tell who wants to know. Comes before the ``Forget`` of an upload that did not end well."""

    key: Key
    facts: Facts
    committed: bool
    error: str
    """Empty for a part, and for a live state of which nobody said more: it was of use for its time."""
    bytes_total: int
    bytes_done: int
    """That are here, whoever brought them."""
    bytes_per_second: float
    """Of those that came, from the beginning until the last did."""
    came_at: float
    """When it did, or else the beginning."""


@dataclass(frozen=True, slots=True)
class Drop:
    """Delete these chunks from every tier: nothing needs them."""

    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Evict:
    """Give back the memory of these chunks; another tier has them."""

    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class Wake:
    """Who waits for these has to look again."""

    what: tuple[Key | bytes, ...]


Decision = Keep | Seal | UploadEnded | Forget | Drop | Evict | Wake
