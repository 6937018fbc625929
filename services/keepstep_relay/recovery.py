"""Restore the checkpoints that the disk tier and the durable tier kept, when a relay starts."""

from __future__ import annotations

from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import ManifestError
from keepstep_relay.checkpoint_store import CheckpointStore
from keepstep_relay.core.events import ChunkArrived, ChunkLost, Key, Kind, Table, Tier
from keepstep_relay.tiers.disk_tier import DiskTier, Record
from keepstep_relay.tiers.durable_tier import DurableTier

log = get_logger("keepstep.relay.recovery")


async def recover(store: CheckpointStore) -> None:
    """Restore the checkpoints of both tiers, delete orphaned chunks, and continue unfinished copies."""
    chunks = store.chunks
    if chunks.disk is not None:
        await _recover_disk(store, chunks.disk)
    if chunks.durable is not None:
        await _recover_durable(store, chunks.durable)
    for one in store.core.checkpoints.values():
        missing = sum(one.missing.values())
        damaged = missing and one.committed_at is not None and one.facts.kind is Kind.DURABLE
        (log.error if damaged else log.info)(
            "damaged checkpoint restored" if damaged else "checkpoint restored",
            job=one.key.job,
            checkpoint=one.key.id,
            state=one.state.value,
            missing_chunks=missing,
        )


async def _recover_disk(store: CheckpointStore, disk: DiskTier) -> None:
    for key, record, manifests in await store.chunks.in_thread(lambda: list(disk.load())):
        tables = await _tables(store, key, record, manifests)
        if tables is None:
            disk.unreadable.add(key)
        else:
            store.restore(key, record, tables, manifests, on_disk=True)
    orphans = []
    for digest, length in await store.chunks.in_thread(lambda: list(disk.found())):
        wanted = store.core.inventory.wanted(digest)
        if wanted == length:
            store.step(ChunkArrived(digest, Tier.DISK))
            continue
        orphans.append(digest)
        if wanted is not None and _is_committed(store, digest):  # an upload may have been cut off
            store.chunks.damaged["disk"] += 1
            log.error("dropped a chunk of the wrong length", digest=digest.hex(), bytes=length, expected=wanted)
    if orphans and not disk.unreadable:
        await store.chunks.in_thread(disk.delete, orphans)


async def _recover_durable(store: CheckpointStore, durable: DurableTier) -> None:
    checkpoints, whole, lost = store.core.checkpoints, set[bytes](), set[bytes]()
    for key, record, manifests in await store.chunks.in_thread(lambda: list(durable.load())):
        tables = await _tables(store, key, record, manifests)
        if tables is None:
            durable.unreadable.add(key)
            continue
        found = await store.chunks.in_thread(durable.lengths, key)
        if key not in checkpoints:
            store.restore(key, record, tables, manifests, on_disk=False)
        one = checkpoints[key]
        chunks = {digest: table.length(n) for table in tables.values() for n, digest in enumerate(table.digests)}
        missing = {digest for digest, length in chunks.items() if found.get(digest) != length}
        whole |= chunks.keys() - missing
        if missing:
            store.chunks.damaged["durable"] += len(missing)
            log.error("chunks are missing in the durable tier", job=key.job, checkpoint=key.id, chunks=len(missing))
        if (one.facts, one.tables) != (record.facts, tables) or (missing and not any(one.missing.values())):
            store.copies.outdated(key)
        else:
            store.copies.found(key)
            lost |= missing
    for digest in lost - whole:
        store.step(ChunkLost(digest, Tier.DURABLE))
    for key, one in checkpoints.items():
        if one.committed_at is not None and one.facts.kind is Kind.DURABLE:
            store.copies.follow(key)


def _is_committed(store: CheckpointStore, digest: bytes) -> bool:
    """Return whether a committed checkpoint has this chunk."""
    users = store.core.inventory.chunks[digest].users
    return any(store.core.checkpoints[key].committed_at is not None for key, _ in users)


async def _tables(
    store: CheckpointStore, key: Key, record: Record, manifests: dict[int, bytes]
) -> dict[int, Table] | None:
    """Return the chunk tables by rank; None, with a log line: the checkpoint cannot be used."""
    try:
        tables = {rank: await store.read_table(manifest) for rank, manifest in manifests.items()}
    except ManifestError as error:
        log.error("skipped a checkpoint: damaged manifest", job=key.job, checkpoint=key.id, reason=str(error))
        return None
    if record.committed is not None and len(tables) < record.facts.ranks:
        log.error("skipped a checkpoint: missing manifest", job=key.job, checkpoint=key.id)
        return None
    return tables
