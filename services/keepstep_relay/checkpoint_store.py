"""The checkpoints of a relay: what is written down of them, their manifests, how one is committed and found again.

The order of a commit: every chunk on disk, verified and synced; manifests synced; the record that says so, synced; only
then the core is told, and whoever asked. The durable tier follows behind, in the background, its record last.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace

from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import KeepstepError, ManifestError
from keepstep_mesh.protocol.manifest import read_envelope
from keepstep_relay.core.events import (
    Aborted,
    Begun,
    Cause,
    ChunkCame,
    CommitAsked,
    Copied,
    Event,
    Facts,
    Forget,
    Keep,
    Key,
    Kind,
    RankReported,
    RefusedError,
    Removed,
    RoomWanted,
    Seal,
    Sealed,
    SealFailed,
    Table,
    TableCame,
    Tick,
    Tier,
    UploadEnded,
)
from keepstep_relay.core.inventory import Checkpoint
from keepstep_relay.tiers.chunks import ROOM_SECONDS, ChunkStore, GoneError
from keepstep_relay.tiers.disk_tier import DamagedError, Record
from keepstep_relay.tiers.durable_tier import DurableError

DURABLE_AGAIN_SECONDS = 30.0
"""After the durable tier failed."""
COMMIT_SECONDS = 600.0
"""Who asks for a commit that another asked for waits at most so long."""

log = get_logger("keepstep.relay.checkpoints")


class CheckpointStore:
    def __init__(self, chunks: ChunkStore) -> None:
        self.chunks = chunks
        self.core = chunks.core
        self.records: dict[Key, Record] = {}
        self.manifests: dict[tuple[Key, int], bytes] = {}
        self.durable: set[Key] = set()
        """That are complete in the durable tier."""
        self.trouble: str | None = None
        """Why the durable tier does not follow."""
        self._written: set[tuple[Key, int]] = set()
        """Manifests, and records as rank -1, that are on disk."""
        self._copied: set[Key] = set()
        """Of which there is something in the durable tier, be it all or a part."""
        self._to_follow: asyncio.Queue[Key] = asyncio.Queue()
        """Of which the durable tier may have less, or more, than it should."""
        self.on_upload: Callable[[UploadEnded, float], None] = lambda _ended, _begun: None
        """Is told of each upload that ended, and when it began, in Unix seconds."""
        chunks.forget = self._forget
        chunks.make_room = lambda size: self._step(RoomWanted(size))

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Finds again what there is, then keeps times."""
        await self._recover()
        tasks = [asyncio.create_task(self._keep_times(), name="keepstep relay times")]
        if self.chunks.durable is not None:
            tasks.append(asyncio.create_task(self._follow(), name="keepstep relay durable tier"))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    # ---- an upload

    async def begin(self, key: Key, facts: Facts) -> bool:
        """False: it was there already. Raises ``RefusedError``, ``DiskError``."""
        if facts.kind is Kind.DURABLE and self.chunks.disk is None and self.chunks.durable is None:
            raise RefusedError(
                Cause.CONFLICT, "this relay keeps nothing over a restart; give it --data-dir or --durable"
            )
        async with self.chunks.turns(key):
            new = Keep(key) in self._step(Begun(key, facts))
            if new:
                self.records[key] = Record(facts, time.time())
                log.info("upload began", job=key.job, checkpoint=key.id, step=facts.step, kind=facts.kind.value)
            await self._write(key, -1)
            return new

    async def put_manifest(self, key: Key, rank: int, manifest: bytes) -> None:
        """Raises ``ManifestError``, ``RefusedError``, ``MemoryFullError``, ``DiskError``."""
        await self.chunks.memory.reserve(len(manifest), ROOM_SECONDS)
        try:
            table = await self._table(manifest)
            async with self.chunks.turns(key):
                self._step(TableCame(key, rank, table))
                if (key, rank) not in self.manifests:
                    self.manifests[key, rank] = manifest
                    manifest = b""
                await self._write(key, -1)
                await self._write(key, rank)
        finally:
            if manifest:
                self.chunks.memory.release(len(manifest))

    async def _table(self, manifest: bytes) -> Table:
        async with self.chunks.turns("manifest"):  # each may take several times its length while it is read
            envelope = await self.chunks.in_thread(read_envelope, manifest)
        return Table(envelope.root, envelope.pack_bytes, envelope.chunk_digests)

    async def report(self, said: RankReported) -> None:
        """Commits if it was the last rank. Raises ``RefusedError``, ``DiskError``, ``DamagedError``."""
        await self._seal(said.key, said)

    async def commit(self, key: Key) -> None:
        """Returns when it is committed. Raises as ``report`` does, and ``TimeoutError``."""
        await self._seal(key, CommitAsked(key))
        deadline = asyncio.get_running_loop().time() + COMMIT_SECONDS
        while (one := self.core.checkpoint(key)).committed_at is None:
            if not one.sealing:
                raise RefusedError(Cause.CONFLICT, f"{key} could not be committed; ask again")
            await self.chunks.bells.wait(key, deadline)

    async def _seal(self, key: Key, event: Event) -> None:
        for decision in self._step(event):
            if isinstance(decision, Seal):
                try:
                    await self._make_last(key, decision.digests)
                except BaseException:
                    self._step(SealFailed(key))
                    raise
                self._step(Sealed(key))
                self.chunks.times_changed.set()
                facts = self.core.checkpoints[key].facts
                log.info("committed", job=key.job, checkpoint=key.id, step=facts.step, kind=facts.kind.value)
                if facts.kind is Kind.DURABLE and self.chunks.durable is not None and key not in self.durable:
                    self._to_follow.put_nowait(key)

    async def _make_last(self, key: Key, digests: tuple[bytes, ...]) -> None:
        one = self.core.checkpoints[key]
        await self.chunks.make_last(digests)
        async with self.chunks.turns(key):
            for rank in range(-1, one.facts.ranks):
                await self._write(key, rank)
            if not one.complete:
                raise DamagedError(f"chunks of {key} were lost while it was committed; upload them again")
            record = replace(self.records[key], committed=time.time())
            if self.chunks.disk is not None:
                await self.chunks.in_thread(self.chunks.disk.commit, key, record)
        if self.chunks.disk is None and one.facts.kind is Kind.DURABLE:
            await self._copy_one(key, record)  # nothing else would make it last
        self.records[key] = record

    async def _write(self, key: Key, rank: int) -> None:
        disk, one = self.chunks.disk, self.core.checkpoints.get(key)
        if disk is None or (key, rank) in self._written or one is None:
            return
        if rank < 0:
            await self.chunks.in_thread(disk.begin, key, self.records[key])
        else:
            await self.chunks.in_thread(disk.put_manifest, key, rank, self.manifests[key, rank])
        if self.core.checkpoints.get(key) is one:  # else what was written is about to be deleted
            self._written.add((key, rank))

    # ---- ends

    async def abort(self, key: Key, reason: str) -> None:
        self._step(Aborted(key, reason))
        await self.chunks.settled()

    async def remove(self, key: Key, reason: str) -> None:
        """Returns when it is gone from every tier."""
        self._step(Removed(key, reason))
        await self.chunks.settled()

    def _step(self, event: Event) -> list[object]:
        rest: list[object] = []
        for decision in self.chunks.step(event):
            match decision:
                case UploadEnded():
                    self.on_upload(decision, self.records[decision.key].begun)
                case Forget():
                    self._forgotten(decision)
                case _:
                    rest.append(decision)
        self.chunks.times_changed.set()
        return rest

    def _forgotten(self, decision: Forget) -> None:
        key = decision.key
        self.durable.discard(key)
        log.info("checkpoint dropped", job=key.job, checkpoint=key.id, reason=decision.reason)
        record = self.records.pop(key)
        for rank in range(record.facts.ranks):
            if (manifest := self.manifests.pop((key, rank), None)) is not None:
                self.chunks.memory.release(len(manifest))
        self._written = {one for one in self._written if one[0] != key}

    async def _forget(self, key: Key) -> None:
        async with self.chunks.turns(key):
            if key in self.core.checkpoints:
                return  # it began anew, over what was there
            if self.chunks.disk is not None:
                await self.chunks.in_thread(self.chunks.disk.forget, key)
        try:
            await self._forget_copy(key)
        except DurableError:
            self._to_follow.put_nowait(key)
            raise

    async def _keep_times(self) -> None:
        while True:
            self.chunks.times_changed.clear()
            left = self.core.deadline() - time.monotonic()
            try:
                async with asyncio.timeout(None if left == float("inf") else max(left, 0.01)):
                    await self.chunks.times_changed.wait()
            except TimeoutError:
                try:
                    self._step(Tick())
                except Exception:
                    log.exception("fault while keeping times")
                    await asyncio.sleep(1.0)

    # ---- what was there before

    async def _recover(self) -> None:
        disk, durable = self.chunks.disk, self.chunks.durable
        if disk is not None:
            await self._restore(await self.chunks.in_thread(lambda: list(disk.load())), on_disk=True)
            found = await self.chunks.in_thread(lambda: list(disk.found()))
            orphans = []
            for digest, length in found:
                if self.core.wanted(digest) == length:
                    self._step(ChunkCame(digest, Tier.DISK))
                else:
                    orphans.append(digest)
            if orphans and not disk.unreadable:
                await self.chunks.in_thread(disk.delete, orphans)
        if durable is not None:
            await self._restore(await self.chunks.in_thread(lambda: list(durable.load())), on_disk=False)
            for key, one in self.core.checkpoints.items():
                if one.committed_at is not None and one.facts.kind is Kind.DURABLE and key not in self.durable:
                    self._to_follow.put_nowait(key)
        for one in self.core.checkpoints.values():
            lacking = sum(one.lacking.values())
            log.info("found again", job=one.key.job, checkpoint=one.key.id, state=one.state.value, lacking=lacking)

    async def _restore(self, found: Iterable[tuple[Key, Record, dict[int, bytes]]], *, on_disk: bool) -> None:
        for key, record, manifests in found:
            try:
                tables = {rank: await self._table(manifest) for rank, manifest in manifests.items()}
            except ManifestError as error:
                log.error("a manifest that was kept is damaged", job=key.job, checkpoint=key.id, reason=str(error))
                if on_disk and self.chunks.disk is not None:
                    self.chunks.disk.unreadable += 1
                continue
            if record.committed is not None and len(tables) < record.facts.ranks:
                log.error("a manifest of a committed checkpoint is missing", job=key.job, checkpoint=key.id)
                if on_disk and self.chunks.disk is not None:
                    self.chunks.disk.unreadable += 1
                continue
            if key not in self.core.checkpoints:
                committed = None if record.committed is None else time.monotonic() - time.time() + record.committed
                self.core.restore(key, record.facts, tables, committed, time.monotonic())
                self.records[key] = record
                for rank, manifest in manifests.items():
                    self.manifests[key, rank] = manifest
                    self.chunks.memory.hold(len(manifest))
                if on_disk:
                    self._written.update((key, rank) for rank in (-1, *manifests))
            if not on_disk:
                self._is_durable(self.core.checkpoints[key])

    # ---- the durable tier

    def _is_durable(self, one: Checkpoint) -> None:
        self._copied.add(one.key)
        self.durable.add(one.key)
        self._step(Copied(one.key))

    async def _follow(self) -> None:
        """Copies what was committed and deletes what was dropped, one after the other; tries for ever, and says why."""
        while True:
            key = await self._to_follow.get()
            while True:
                one = self.core.checkpoints.get(key)
                try:
                    if one is None and key in self._copied:
                        await self._forget_copy(key)
                    elif one is not None and one.committed_at is not None and key not in self.durable:
                        await self._copy_one(key, self.records[key])
                    else:
                        break
                    self.trouble = None
                except (KeepstepError, GoneError, TimeoutError) as error:
                    if self.core.checkpoints.get(key) is one:
                        self.trouble = f"the durable tier has not followed {key}: {error}"
                        log.error("durable tier is behind", job=key.job, checkpoint=key.id, reason=str(error))
                        await asyncio.sleep(DURABLE_AGAIN_SECONDS)

    async def _copy_one(self, key: Key, record: Record) -> None:
        """Raises ``GoneError`` when the checkpoint is dropped meanwhile, ``KeepstepError`` of the tiers."""
        durable, one = self.chunks.durable, self.core.checkpoints[key]
        if durable is None:
            return
        manifests = {rank: self.manifests[key, rank] for rank in range(one.facts.ranks)}
        async with self.chunks.turns((key, "durable")):
            for digest in dict.fromkeys(digest for digest, _ in one.chunks()):
                self._check_is(one)
                self._copied.add(key)
                async with self.chunks.reading(digest, 0.0) as data:
                    await self.chunks.in_thread(durable.write_chunk, key, digest, data)
            self._check_is(one)
            self._copied.add(key)
            await self.chunks.in_thread(durable.commit, key, record, manifests)
            self._check_is(one)
            self._is_durable(one)
        log.info("in the durable tier", job=key.job, checkpoint=key.id, url=durable.url)

    def _check_is(self, one: Checkpoint) -> None:
        if self.core.checkpoints.get(one.key) is not one:
            raise GoneError(f"{one.key} was dropped while it was copied")

    async def _forget_copy(self, key: Key) -> None:
        """Deletes what the durable tier has of a checkpoint that is no more. Raises ``DurableError``."""
        async with self.chunks.turns((key, "durable")):
            if self.chunks.durable is not None and key in self._copied and key not in self.core.checkpoints:
                await self.chunks.in_thread(self.chunks.durable.forget, key)
                self._copied.discard(key)
