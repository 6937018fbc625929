"""Answers of a relay, as JSON."""

from __future__ import annotations

import time
from dataclasses import dataclass

from keepstep_relay.checkpoint_store import CheckpointStore
from keepstep_relay.core.checkpoint import Checkpoint
from keepstep_relay.core.events import Kind, State, Tier


@dataclass(frozen=True, slots=True)
class RankView:
    rank: int
    root: str | None
    """Root digest that counts, in hex; None before the first."""
    roots: dict[str, str]
    """Root digest of each producer. A replica with another root has diverged."""
    has_manifest: bool
    bytes: int
    chunks: int
    lacking: int
    """Distinct chunks that are not here."""
    reported: bool


@dataclass(frozen=True, slots=True)
class CheckpointView:
    job: str
    id: str
    step: int
    kind: Kind
    quorum_id: int
    ranks: int
    state: State
    begun: float
    """Unix seconds, as the next."""
    committed: float | None
    bytes: int
    chunks: int
    lacking: int
    lacking_bytes: int
    """Counts the manifests that are here, as ``bytes`` does."""
    bytes_per_second: float
    """Bytes that arrived per second, over the last seconds."""
    in_memory: int
    """Distinct chunks, as in ``on_disk``."""
    on_disk: int
    durable: bool
    """The durable tier has all of it."""
    holders: int
    version: int
    """Number of the save that made it, from 0. ``ID~VERSION`` names this one also after a save that overwrites it."""


@dataclass(frozen=True, slots=True)
class CheckpointDetail:
    checkpoint: CheckpointView
    by_rank: tuple[RankView, ...]


@dataclass(frozen=True, slots=True)
class CheckpointsView:
    job: str
    latest: CheckpointView | None
    """Committed checkpoint with the highest quorum_id, of these with the highest step."""
    checkpoints: tuple[CheckpointView, ...]
    """By step."""
    unreadable: tuple[str, ...]
    """Ids of checkpoints whose record or manifest is damaged."""


@dataclass(frozen=True, slots=True)
class PlanView:
    rank: int
    root: str
    """Root digest that counts."""
    agrees: bool
    """Whether the request had this root. If not, upload no chunks."""
    has_manifest: bool
    """False: send the manifest before the first chunk."""
    chunks: int
    lacking: int
    lacks: str
    """Bitmap in hex: bit ``i % 8`` of byte ``i // 8``, lowest first, is set if chunk i is missing."""


@dataclass(frozen=True, slots=True)
class HolderView:
    name: str
    address: str
    has: str
    """Bitmap in hex of the chunks that it serves; bits as in ``PlanView``."""


@dataclass(frozen=True, slots=True)
class HoldersView:
    rank: int
    chunks: int
    relay: str
    """Bitmap in hex of the chunks that this relay has."""
    holders: tuple[HolderView, ...]


def checkpoint_view(store: CheckpointStore, one: Checkpoint) -> CheckpointView:
    record = store.records[one.key]
    tiers = [store.core.inventory.chunks[digest].tiers for digest in one.digests()]
    return CheckpointView(
        job=one.key.job,
        id=one.key.name,
        step=one.facts.step,
        kind=one.facts.kind,
        quorum_id=one.facts.quorum_id,
        ranks=one.facts.ranks,
        state=one.state,
        begun=record.begun,
        committed=record.committed,
        bytes=sum(table.pack_bytes for table in one.tables.values()),
        chunks=sum(len(table.digests) for table in one.tables.values()),
        lacking=sum(one.missing.values()),
        lacking_bytes=store.core.missing_bytes(one),
        bytes_per_second=0.0 if one.committed_at is not None else one.throughput.rate(time.monotonic()),
        in_memory=sum(Tier.MEMORY in one for one in tiers),
        on_disk=sum(Tier.DISK in one for one in tiers),
        durable=one.key in store.copies.complete,
        holders=len(one.holders),
        version=one.key.version,
    )


def detail_view(store: CheckpointStore, one: Checkpoint) -> CheckpointDetail:
    ranks = sorted({*one.tables, *one.roots})
    return CheckpointDetail(checkpoint_view(store, one), tuple(_rank_view(one, rank) for rank in ranks))


def _rank_view(one: Checkpoint, rank: int) -> RankView:
    table, root = one.tables.get(rank), one.root(rank)
    return RankView(
        rank=rank,
        root=None if root is None else root.hex(),
        roots={producer: root.hex() for producer, root in one.roots.get(rank, {}).items()},
        has_manifest=table is not None,
        bytes=table.pack_bytes if table else 0,
        chunks=len(table.digests) if table else 0,
        lacking=one.missing.get(rank, 0),
        reported=rank in one.reported,
    )


def plan_view(store: CheckpointStore, one: Checkpoint, rank: int, root_of_request: bytes) -> PlanView:
    table, root = one.tables.get(rank), one.root(rank) or root_of_request
    bitmap, missing = store.core.inventory.missing(table) if table else (b"", 0)
    chunks = len(table.digests) if table else 0
    return PlanView(rank, root.hex(), root == root_of_request, table is not None, chunks, missing, bitmap.hex())


def holders_view(store: CheckpointStore, one: Checkpoint, rank: int) -> HoldersView:
    table = one.tables.get(rank)
    chunks = len(table.digests) if table else 0
    missing, _ = store.core.inventory.missing(table) if table else (b"", 0)
    here = bytearray(byte ^ 0xFF for byte in missing)
    if chunks % 8:
        here[-1] &= (1 << chunks % 8) - 1
    holders = [
        HolderView(name, holder.address, holder.bitmap.hex())
        for (of, name), holder in sorted(one.holders.items())
        if of == rank
    ]
    return HoldersView(rank, chunks, here.hex(), tuple(holders))
