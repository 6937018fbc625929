"""Restore the checkpoints that the disk tier and the durable tier kept, when a relay starts."""

from __future__ import annotations

from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import ManifestError
from keepstep_relay.checkpoint_store import CheckpointStore
from keepstep_relay.core.events import ChunkArrived, Key, Kind, Table, Tier
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
        log.info(
            "checkpoint restored",
            job=one.key.job,
            checkpoint=one.key.id,
            state=one.state.value,
            missing_chunks=sum(one.missing.values()),
        )


async def _recover_disk(store: CheckpointStore, disk: DiskTier) -> None:
    for key, record, manifests in await store.chunks.in_thread(lambda: list(disk.load())):
        tables = await _tables(store, key, record, manifests)
        if tables is None:
            disk.unreadable += 1
        else:
            store.restore(key, record, tables, manifests, on_disk=True)
    orphans = []
    for digest, length in await store.chunks.in_thread(lambda: list(disk.found())):
        if store.core.inventory.wanted(digest) == length:
            store.step(ChunkArrived(digest, Tier.DISK))
        else:
            orphans.append(digest)
    if orphans and not disk.unreadable:
        await store.chunks.in_thread(disk.delete, orphans)


async def _recover_durable(store: CheckpointStore, durable: DurableTier) -> None:
    checkpoints = store.core.checkpoints
    for key, record, manifests in await store.chunks.in_thread(lambda: list(durable.load())):
        tables = await _tables(store, key, record, manifests)
        if tables is None:
            continue
        if key not in checkpoints:
            store.restore(key, record, tables, manifests, on_disk=False)
        if (checkpoints[key].facts, checkpoints[key].tables) == (record.facts, tables):
            store.copies.found(key)
        else:
            store.copies.outdated(key)
    for key, one in checkpoints.items():
        if one.committed_at is not None and one.facts.kind is Kind.DURABLE:
            store.copies.follow(key)


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
