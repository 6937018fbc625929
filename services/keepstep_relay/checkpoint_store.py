"""The checkpoints of a relay: their records and manifests, and how each begins, is committed and ends.

The order of a commit: every chunk on disk, verified and synced; manifests synced; the record of the commit, synced;
then the core commits and the request is answered. The durable tier (``DurableCopies``) follows in the background.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.protocol.manifest import chunk_digest, read_envelope
from keepstep_relay.core.events import (
    Aborted,
    Begun,
    Cause,
    CommitAsked,
    Copied,
    DiskFull,
    Event,
    Facts,
    Forget,
    Keep,
    Key,
    Kind,
    LayoutReported,
    MemoryWanted,
    RankReported,
    RefusedError,
    Removed,
    Seal,
    Sealed,
    SealFailed,
    Table,
    TableArrived,
    Tick,
    TooLate,
    UploadEnded,
)
from keepstep_relay.core.machine import RelayCore
from keepstep_relay.tiers.chunks import ROOM_SECONDS, ChunkStore
from keepstep_relay.tiers.disk_tier import DamagedError, DiskError, DiskTier, Record
from keepstep_relay.tiers.durable_copies import DurableCopies
from keepstep_relay.tiers.durable_tier import DurableTier

COMMIT_SECONDS = 600.0
"""A request for a commit that is already under way waits for it this long."""
DEADLINE_PAUSE_SECONDS = 0.05
"""Events of this time share a look at all checkpoints for the next deadline."""
RECORD = -1
"""Stands for the record where other entries have a rank."""

log = get_logger("keepstep.relay.checkpoints")


class CheckpointStore:
    """Checkpoints in the given tiers.

    ``on_upload`` is called with each upload that ended, and when it began (Unix time); ``on_forget`` gets each
    deleted checkpoint. ``durable_in_memory``: accept durable checkpoints although neither disk nor durable tier is
    there.
    """

    def __init__(
        self,
        core: RelayCore,
        memory_bytes: int,
        disk: DiskTier | None,
        durable: DurableTier | None,
        on_upload: Callable[[UploadEnded, float], None],
        *,
        on_forget: Callable[[Key], None] = lambda _: None,
        durable_in_memory: bool = False,
    ) -> None:
        self.core = core
        self.chunks = ChunkStore(
            *(core, memory_bytes, disk, durable),
            make_room=self._make_room,
            make_disk_room=self._make_disk_room,
            forget=self._forget,
        )
        self.copies = DurableCopies(self.chunks, on_copied=lambda key: self.step(Copied(key)))
        self.records: dict[Key, Record] = {}
        self.manifests: dict[tuple[Key, int], bytes] = {}
        """By checkpoint and rank."""
        self.layouts: dict[tuple[Key, bytes], bytes] = {}
        """By checkpoint and digest, until the end of the upload."""
        self._on_upload = on_upload
        self._tell_forgotten = on_forget
        self._accepts_durable = durable_in_memory or disk is not None or durable is not None
        self._written: set[tuple[Key, int]] = set()
        """Manifests and records (``RECORD``) that are on disk."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._run_ticks(), name="keepstep relay ticks")]
        if self.chunks.durable is not None:
            copying = self.copies.run(self._copy_of)
            tasks.append(asyncio.create_task(copying, name="keepstep relay durable tier"))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    # ---- an upload

    async def begin(self, key: Key, facts: Facts, rank: int | None = None, *, again: bool = True) -> bool:
        """Return False if the checkpoint exists already. Raises ``RefusedError``, ``DiskError``.

        Args:
            key: of ``RelayCore.to_begin``.
            facts: that all ranks have in common.
            rank: the one that begins; None: the request does not name it.
            again: begin a checkpoint that was deleted. False: refuse it, with the reason of the deletion.
        """
        if facts.kind is Kind.DURABLE and not self._accepts_durable:
            raise RefusedError(
                Cause.CONFLICT,
                f"{key} is durable, but this relay only has memory; start it with --data-dir, --durable or "
                f"--memory-checkpoints",
            )
        async with self.chunks.locks(key):
            decisions = self.step(Begun(key, facts, rank, again))
            for one in decisions:
                if isinstance(one, TooLate):
                    raise RefusedError(Cause.GONE, f"{key} was deleted: {one.reason}")
            new = Keep(key) in decisions
            if new:
                self.records[key] = Record(facts, time.time())
                log.info("upload began", job=key.job, checkpoint=key.id, step=facts.step, kind=facts.kind.value)
            await self._write_early(key, RECORD)
            return new

    async def put_layout(self, key: Key, rank: int, layout: bytes) -> None:
        """Raises ``RefusedError``, ``MemoryFullError``."""
        digest = chunk_digest(layout)
        await self.chunks.memory.reserve(len(layout), ROOM_SECONDS)
        try:
            self.step(LayoutReported(key, rank, digest))
            if (key, digest) not in self.layouts:
                self.layouts[key, digest] = layout
                layout = b""
        finally:
            if layout:
                self.chunks.memory.release(len(layout))

    def _drop_layouts(self, key: Key) -> None:
        for one in [one for one in self.layouts if one[0] == key]:
            self.chunks.memory.release(len(self.layouts.pop(one)))

    async def put_manifest(self, key: Key, rank: int, manifest: bytes) -> None:
        """Raises ``ManifestError``, ``RefusedError``, ``MemoryFullError``, ``DiskError``."""
        await self.chunks.memory.reserve(len(manifest), ROOM_SECONDS)
        try:
            table = await self.read_table(manifest)
            async with self.chunks.locks(key):
                self.step(TableArrived(key, rank, table))
                if (key, rank) not in self.manifests:
                    self.manifests[key, rank] = manifest
                    manifest = b""
                await self._write_early(key, RECORD)
                await self._write_early(key, rank)
        finally:
            if manifest:
                self.chunks.memory.release(len(manifest))

    async def read_table(self, manifest: bytes) -> Table:
        """Return the chunk table of a manifest. Raises ``ManifestError``."""
        async with self.chunks.locks("manifest"):  # reading one may take several times its size of memory
            envelope = await self.chunks.in_thread(read_envelope, manifest)
        return Table(envelope.root, envelope.pack_bytes, envelope.chunk_digests)

    async def report(self, report: RankReported) -> None:
        """Apply a rank's report; the last one commits. Raises ``RefusedError``, ``DiskError``, ``DamagedError``."""
        await self._seal(report.key, report)

    async def commit(self, key: Key) -> None:
        """Return when the checkpoint is committed. Raises as ``report`` does, and ``TimeoutError``."""
        await self._seal(key, CommitAsked(key))
        deadline = asyncio.get_running_loop().time() + COMMIT_SECONDS
        while (one := self.core.checkpoint(key)).committed_at is None:
            if not one.sealing:
                raise RefusedError(Cause.CONFLICT, f"the commit of {key} failed; retry")
            await self.chunks.notifier.wait(key, deadline)

    async def _seal(self, key: Key, event: Event) -> None:
        for decision in self.step(event):
            if isinstance(decision, Seal):
                try:
                    await self._persist(key, decision.digests)
                except BaseException:
                    self.step(SealFailed(key))
                    raise
                facts = self.core.checkpoints[key].facts
                self.step(Sealed(key))  # which may drop it, if newer live checkpoints are enough
                self._drop_layouts(key)
                log.info("committed", job=key.job, checkpoint=key.id, step=facts.step, kind=facts.kind.value)
                if facts.kind is Kind.DURABLE:
                    self.copies.follow(key)

    async def _persist(self, key: Key, digests: tuple[bytes, ...]) -> None:
        one = self.core.checkpoints[key]
        await self.chunks.persist(digests)
        async with self.chunks.locks(key):
            for rank in range(RECORD, one.facts.ranks):
                await self._write(key, rank)
            if not one.complete:
                raise DamagedError(f"damaged chunks in {key}; upload them again")
            record = replace(self.records[key], committed=time.time())
            if self.chunks.disk is not None:
                await self.chunks.to_disk(self.chunks.disk.commit, key, record)
        if self.chunks.disk is None and one.facts.kind is Kind.DURABLE:
            await self.copies.copy(one, record, self._manifests_of(key))
        self.records[key] = record

    async def _write_early(self, key: Key, rank: int) -> None:
        """Write before the commit. A live state goes on from memory if the disk is full; the commit writes the rest."""
        try:
            await self._write(key, rank)
        except DiskError as error:
            one = self.core.checkpoints.get(key)
            if not error.full or (one is not None and one.facts.kind is Kind.DURABLE):
                raise

    async def _write(self, key: Key, rank: int) -> None:
        disk, one = self.chunks.disk, self.core.checkpoints.get(key)
        if disk is None or (key, rank) in self._written or one is None or one.committed_at is not None:
            return
        if rank == RECORD:
            await self.chunks.to_disk(disk.begin, key, self.records[key])
        else:
            await self.chunks.to_disk(disk.put_manifest, key, rank, self.manifests[key, rank])
        if self.core.checkpoints.get(key) is one:  # otherwise the files are about to be deleted
            self._written.add((key, rank))

    def _manifests_of(self, key: Key) -> dict[int, bytes]:
        return {rank: self.manifests[key, rank] for rank in range(self.core.checkpoints[key].facts.ranks)}

    def _copy_of(self, key: Key) -> tuple[Record, dict[int, bytes]]:
        return self.records[key], self._manifests_of(key)

    def restore(
        self, key: Key, record: Record, tables: dict[int, Table], manifests: dict[int, bytes], *, on_disk: bool
    ) -> None:
        """Add a checkpoint that a tier kept from an earlier process."""
        committed = None if record.committed is None else time.monotonic() - time.time() + record.committed
        self.core.restore(key, record.facts, tables, committed, time.monotonic())
        self.records[key] = record
        for rank, manifest in manifests.items():
            self.manifests[key, rank] = manifest
            self.chunks.memory.hold(len(manifest))
        if on_disk:
            self._written.update((key, rank) for rank in (RECORD, *manifests))

    @property
    def unreadable(self) -> set[Key]:
        """Checkpoints whose record or manifest is damaged in each tier that has them."""
        found = (tier.unreadable for tier in (self.chunks.disk, self.chunks.durable) if tier is not None)
        return set().union(*found) - self.records.keys()

    @property
    def damaged(self) -> int:
        """Number of committed checkpoints that cannot be loaded from this relay. Counts only durable ones."""
        kept = self.core.checkpoints.values()
        durable = (one for one in kept if one.committed_at is not None and one.facts.kind is Kind.DURABLE)
        return len(self.unreadable) + sum(any(one.missing.values()) for one in durable)

    # ---- ends

    async def abort(self, key: Key, reason: str) -> None:
        self.step(Aborted(key, reason))
        await self.chunks.settled()

    async def remove(self, key: Key, reason: str) -> None:
        """Return when every tier has deleted all versions of the checkpoint."""
        for version in reversed(self.core.versions(key)):  # one that is being uploaded would replace the others
            if version.key in self.core.checkpoints:
                self.step(Removed(version.key, reason))
        await self.chunks.settled()

    def step(self, event: Event) -> list[object]:
        """Apply an event, and carry out the decisions about chunks and ends. Return the other decisions."""
        rest: list[object] = []
        for decision in self.chunks.step(event):
            match decision:
                case UploadEnded():
                    self._on_upload(decision, self.records[decision.key].begun)
                case Forget():
                    self._on_forget(decision)
                case _:
                    rest.append(decision)
        self.chunks.deadline_changed.set()
        return rest

    def _make_room(self, size: int) -> None:
        self.step(MemoryWanted(size))

    def _make_disk_room(self) -> bool:
        before = len(self.core.checkpoints)
        self.step(DiskFull())
        return len(self.core.checkpoints) < before

    def _on_forget(self, decision: Forget) -> None:
        key = decision.key
        self.copies.on_forget(key)
        self._tell_forgotten(key)
        log.info("checkpoint dropped", job=key.job, checkpoint=key.id, reason=decision.reason)
        self._drop_layouts(key)
        record = self.records.pop(key)
        for rank in range(record.facts.ranks):
            if (manifest := self.manifests.pop((key, rank), None)) is not None:
                self.chunks.memory.release(len(manifest))
        self._written = {one for one in self._written if one[0] != key}

    async def _forget(self, key: Key) -> None:
        """Delete a dropped checkpoint from disk and from the durable tier. Raises ``DiskError``, ``DurableError``."""
        async with self.chunks.locks(key):
            if key in self.core.checkpoints:
                return  # a new upload of that name began
            if self.chunks.disk is not None:
                await self.chunks.in_thread(self.chunks.disk.forget, key)
        await self.copies.forget(key)

    async def _run_ticks(self) -> None:
        while True:
            self.chunks.deadline_changed.clear()
            left = self.core.deadline() - time.monotonic()
            try:
                async with asyncio.timeout(None if left == float("inf") else max(left, 0.01)):
                    await self.chunks.deadline_changed.wait()
            except TimeoutError:
                try:
                    self.step(Tick())
                except Exception:
                    log.exception("fault in a tick")
                    await asyncio.sleep(1.0)
            else:
                await asyncio.sleep(DEADLINE_PAUSE_SECONDS)


def newest_durable(store: CheckpointStore) -> dict[str, Record]:
    """Return the record of the last durable commit of each job, except those of ``keepstep.checkpoint.save``."""
    newest: dict[str, Record] = {}
    for key, record in store.records.items():
        if record.facts.kind is Kind.DURABLE and record.facts.of_manager and record.committed is not None:
            known = newest.get(key.job)
            if known is None or (known.committed or 0.0) < record.committed:
                newest[key.job] = record
    return newest
