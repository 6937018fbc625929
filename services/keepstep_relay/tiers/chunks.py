"""The chunks of a relay in memory, on disk and in the durable tier. A chunk is immutable and named by its digest.

An upload of a chunk: reserve memory, receive, check the digest, show it to readers, answer. The disk is written in the
background, so that readers never wait for it; a commit waits for all of its chunks. While the disk fails, each chunk is
written before its request is answered. A read: wait for the chunk, hold it, load and check it, send it, release it.
Chunks that the core drops are deleted in the background; an upload of the same chunk waits for the deletion.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from keepstep_mesh.config.log_limiter import LogLimiter
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.protocol.manifest import CHUNK_BYTES
from keepstep_mesh.serving.notifier import Notifier
from keepstep_mesh.threads.starting import ThreadPoolExecutor
from keepstep_relay.core.events import (
    ChunkArrived,
    ChunkHeld,
    ChunkLost,
    ChunkReleased,
    Decision,
    Drop,
    Event,
    Evict,
    Forget,
    HolderReported,
    Key,
    Kind,
    Tier,
    Wake,
)
from keepstep_relay.core.inventory import Chunk
from keepstep_relay.core.machine import RelayCore
from keepstep_relay.tiers.disk_tier import DamagedError, DiskError, DiskTier, UnreadableError
from keepstep_relay.tiers.durable_tier import DurableError, DurableTier
from keepstep_relay.tiers.locks import KeyedLock
from keepstep_relay.tiers.memory_tier import MemoryTier

T = TypeVar("T")

WRITERS = 4
"""Chunks that are written at a time. More do not make a disk quicker, and fewer wait for its syncs."""
THREADS = WRITERS + 4
"""For writing, and for reading and hashing."""
FLUSH_SECONDS = 5.0
"""At the end, for accepted chunks that are not on disk yet."""
ROOM_SECONDS = 5.0
"""A request waits this long for memory, or for deletions on a full disk."""
TRY_DISK_SECONDS = 5.0
TRIED_BYTES = 4096
"""Written to try the disk. After a chunk was not written, a whole chunk is tried."""

log = get_logger("keepstep.relay.chunks")


class GoneError(Exception):
    """A chunk that no upload will bring."""


class ChunkStore:
    """Usable while ``running`` is open.

    Args:
        core: The state machine.
        memory_bytes: Size of the memory tier.
        disk: The disk tier; None: without one.
        durable: The durable tier; None: without one.
        make_room: Frees so many bytes of memory, as far as possible.
        make_disk_room: Drops a checkpoint that may go. Returns False if none may.
        forget: Deletes the files of a dropped checkpoint.
    """

    def __init__(
        self,
        core: RelayCore,
        memory_bytes: int,
        disk: DiskTier | None,
        durable: DurableTier | None,
        make_room: Callable[[int], None],
        make_disk_room: Callable[[], bool],
        forget: Callable[[Key], Awaitable[None]],
    ) -> None:
        self.core = core
        self.memory = MemoryTier(memory_bytes, make_room)
        self.disk = disk
        self.durable = durable
        self.notifier = Notifier()
        """Keys: checkpoints and digests of chunks."""
        self.locks = KeyedLock()
        self.deadline_changed = asyncio.Event()
        """Set when the core's deadline may be earlier than before."""
        self.damaged: Counter[str] = Counter()
        """Chunks with a wrong digest or that a disk cannot read, by origin: ``upload``, ``disk``, ``durable``."""
        self.evicted = 0
        self.disk_trouble: str | None = None
        """Why the last write of a chunk to disk failed; None: it did not."""
        self.tried_disk: str | None = None
        """The same of the last small file."""
        self._forget = forget
        self._make_disk_room = make_disk_room
        self._full_log = LogLimiter()
        self._making_room = asyncio.Lock()
        self._to_write: asyncio.Queue[bytes] = asyncio.Queue()
        self._verified: set[bytes] = set()
        """Chunks on disk whose digest this process has checked."""
        self._to_sweep: asyncio.Queue[Drop | Forget | asyncio.Future[None]] = asyncio.Queue()
        self._threads: ThreadPoolExecutor

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        with ThreadPoolExecutor(THREADS, thread_name_prefix="keepstep-relay") as self._threads:
            tasks = [asyncio.create_task(self._sweep(), name="keepstep relay sweeper")]
            tasks += [asyncio.create_task(self._write(), name="keepstep relay writer") for _ in range(WRITERS)]
            if self.disk is not None:
                tasks.append(asyncio.create_task(self._try_disk(self.disk), name="keepstep relay disk"))
            try:
                yield
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(FLUSH_SECONDS):
                        await self._to_write.join()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

    async def in_thread(self, function: Callable[..., T], *arguments: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *arguments)

    async def _try_disk(self, disk: DiskTier) -> None:
        """Write to the disk from time to time: a relay that gets no chunks notices neither a full disk nor its end."""
        while True:
            await asyncio.sleep(TRY_DISK_SECONDS)
            try:
                await self.in_thread(disk.try_write, TRIED_BYTES if self.disk_trouble is None else CHUNK_BYTES)
            except DiskError as error:
                if self.tried_disk is None:
                    log.error("disk accepts no writes", reason=str(error))
                self.tried_disk = str(error)
            else:
                self.tried_disk = self.disk_trouble = None

    async def to_disk(self, write: Callable[..., None], *arguments: object) -> None:
        """Write. If the disk is full, wait for due deletions, and write again after each checkpoint that may go.

        Raises ``DiskError``.
        """
        try:
            return await self.in_thread(write, *arguments)
        except DiskError as error:
            if not error.full:
                raise
        await self._settled_soon()
        may_drop = True
        async with self._making_room:  # the room made for one write may be enough for the next
            while True:
                try:
                    return await self.in_thread(write, *arguments)
                except DiskError as error:
                    if not error.full:
                        raise
                    if not may_drop or not self._make_disk_room():
                        if self._full_log.allows(time.monotonic()):
                            log.error("the disk is full", reason=str(error))
                        raise
                    may_drop = await self._settled_soon()  # drop no more while nothing is deleted

    def step(self, event: Event) -> list[Decision]:
        """Apply an event, and carry out the decisions about chunks. Return the others for the caller to carry out."""
        rest: list[Decision] = []
        if isinstance(event, (HolderReported, ChunkLost)):
            self.deadline_changed.set()
        for decision in self.core.step(event, time.monotonic()):
            match decision:
                case Wake(what):
                    for one in what:
                        self.notifier.notify(one)
                case Evict(digests):
                    self.evicted += len(digests)
                    for digest in digests:
                        self.memory.drop(digest)
                case Drop(digests):
                    for digest in digests:
                        self.memory.drop(digest)
                    self._to_sweep.put_nowait(decision)
                case Forget():
                    self._to_sweep.put_nowait(decision)
                    rest.append(decision)
                case _:
                    rest.append(decision)
        return rest

    # ---- uploads

    async def put(self, digest: bytes, data: memoryview, found: bytes) -> None:
        """Store a chunk for which memory was reserved.

        Args:
            digest: Name of the chunk.
            data: Its bytes.
            found: Digest of ``data``.

        Raises:
            DamagedError: The digest is wrong. The chunk is not kept.
            DiskError: The chunk is in memory and readers get it, but writing it to disk failed.
        """
        if found != digest:
            self.memory.release(data.nbytes)
            self.damaged["upload"] += 1
            raise DamagedError(f"damaged chunk: {data.nbytes} bytes with digest {found.hex()}, expected {digest.hex()}")
        if self.core.inventory.is_here(digest) and digest not in self.memory.chunks:
            self.memory.release(data.nbytes)
        else:
            self.memory.put(digest, data)
            self.step(ChunkArrived(digest, Tier.MEMORY))
        if self.disk_trouble is None:
            self._to_write.put_nowait(digest)
        else:
            await self.save(digest)

    async def _write(self) -> None:
        while True:
            digest = await self._to_write.get()
            try:
                await self.save(digest)
            except DiskError as error:
                if not error.full:
                    log.error("could not write a chunk; it is in memory only", digest=digest.hex(), reason=str(error))
            except Exception:
                log.exception("fault in the writer", digest=digest.hex())
            finally:
                self._to_write.task_done()

    async def save(self, digest: bytes) -> None:
        """Write a chunk to disk, if only memory has it. Raises ``DiskError``."""
        if self.disk is None:
            return
        async with self.locks(digest):
            chunk, data = self.core.inventory.chunks.get(digest), self.memory.chunks.get(digest)
            if chunk is None or data is None or Tier.DISK in chunk.tiers:
                return
            try:
                await self.to_disk(self.disk.write, digest, data, self._is_durable(chunk))
            except DiskError as error:
                self.disk_trouble = str(error)
                raise
            self.disk_trouble = None
            if self.core.inventory.chunks.get(digest) is chunk:
                self._verified.add(digest)
                self.step(ChunkArrived(digest, Tier.DISK))
                self.memory.look_again()
            else:
                self._to_sweep.put_nowait(Drop((digest,)))

    def _is_durable(self, chunk: Chunk) -> bool:
        """Whether a commit will sync it: then it is synced when it is written, while the next chunks arrive."""
        return any(self.core.checkpoints[key].facts.kind is Kind.DURABLE for key, _ in chunk.users)

    async def persist(self, digests: tuple[bytes, ...]) -> None:
        """Return when all chunks are on disk, verified and synced. Raises ``DamagedError`` or ``DiskError``."""
        if self.disk is None:
            return
        for digest in digests:
            chunk = self.core.inventory.chunks[digest]
            if Tier.DISK not in chunk.tiers and Tier.DURABLE in chunk.tiers:
                async with self.reading(digest, 0.0):
                    await self.save(digest)
            elif Tier.DISK not in chunk.tiers:
                await self.save(digest)
            elif digest not in self._verified:
                await self._verify(digest, chunk)
        await self.in_thread(self.disk.sync, digests)

    async def _verify(self, digest: bytes, chunk: Chunk) -> None:
        if self.disk is None:
            return
        try:
            await self.in_thread(self.disk.read, digest, memoryview(bytearray(chunk.length)))
        except DamagedError as error:
            self._damaged_on_disk(digest, error)
            raise
        self._verified.add(digest)

    # ---- readers

    @asynccontextmanager
    async def reading(self, digest: bytes, seconds: float) -> AsyncIterator[memoryview]:
        """Yield the bytes of a chunk once it is here, and hold them until the context ends.

        Args:
            digest: Digest of the chunk.
            seconds: Time to wait for the chunk.

        Raises:
            TimeoutError: The chunk did not arrive in time.
            GoneError: No upload will bring the chunk.
            MemoryFullError: Memory for the chunk did not become free.
            DiskError, DurableError: Reading it failed. It may succeed later.
        """
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            await self._arrival(digest, deadline)
            self.step(ChunkHeld(digest))
            try:
                data = await self._bytes(digest)
                if data is not None:
                    yield data
                    return
            finally:
                self.step(ChunkReleased(digest))
                self.memory.look_again()

    async def _arrival(self, digest: bytes, deadline: float) -> None:
        while not self.core.inventory.is_here(digest):
            if not self.core.is_coming(digest):
                raise GoneError(f"missing chunk {digest.hex()}, and no open upload names it")
            await self.notifier.wait(digest, deadline)

    async def _bytes(self, digest: bytes) -> memoryview | None:
        """Return the bytes; None: no copy could be read."""
        if (data := self.memory.chunks.get(digest)) is not None:
            return data
        async with self.locks((digest, "load")):
            if (data := self.memory.chunks.get(digest)) is not None:
                return data
            chunk = self.core.inventory.chunks[digest]
            await self.memory.reserve(chunk.length, ROOM_SECONDS)
            try:
                data = await self._load(digest, chunk)
            except BaseException:
                self.memory.release(chunk.length)
                raise
            if data is None:
                self.memory.release(chunk.length)
                return None
            self.memory.put(digest, data)
            self.step(ChunkArrived(digest, Tier.MEMORY))
            return data

    async def _load(self, digest: bytes, chunk: Chunk) -> memoryview | None:
        if self.disk is not None and Tier.DISK in chunk.tiers:
            try:
                data = self.memory.buffer(chunk.length)
                await self.in_thread(self.disk.read, digest, data)
                self._verified.add(digest)
                return data
            except DamagedError as error:
                self._damaged_on_disk(digest, error)
        if self.durable is not None and Tier.DURABLE in chunk.tiers:
            try:
                users = sorted(key for key, _ in chunk.users)
                return await self.in_thread(self.durable.read, users, digest, chunk.length)
            except DamagedError as error:
                self.damaged["durable"] += 1
                log.error("dropped an unusable chunk from the durable tier", digest=digest.hex(), reason=str(error))
                self.step(ChunkLost(digest, Tier.DURABLE))
        return None

    def _damaged_on_disk(self, digest: bytes, error: DamagedError) -> None:
        """Drop the chunk, so that readers do not get it and a worker can upload it again."""
        self.damaged["disk"] += 1
        log.error("dropped a damaged chunk from disk", digest=digest.hex(), reason=str(error))
        self._verified.discard(digest)
        self.step(ChunkLost(digest, Tier.DISK))
        if not isinstance(error, UnreadableError):
            self._to_sweep.put_nowait(Drop((digest,)))

    # ---- room

    async def settled(self) -> None:
        """Return when all deletions that are due by now are done."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._to_sweep.put_nowait(done)
        await done

    async def _settled_soon(self) -> bool:
        """Return False after ``ROOM_SECONDS``: a deletion may wait for a lock that the caller holds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ROOM_SECONDS):
                await self.settled()
                return True
        return False

    async def _sweep(self) -> None:
        while True:
            work = await self._to_sweep.get()
            try:
                match work:
                    case Drop(digests):
                        for digest in digests:
                            await self._delete(digest)
                    case Forget(key):
                        await self._forget(key)
                    case asyncio.Future() as settled if not settled.done():
                        settled.set_result(None)
            except (OSError, DiskError, DurableError) as error:
                log.error("deletion failed", what=repr(work)[:200], reason=str(error))
            except Exception:
                log.exception("fault in a deletion", what=repr(work)[:200])

    async def _delete(self, digest: bytes) -> None:
        if self.disk is None:
            return
        async with self.locks(digest):
            chunk = self.core.inventory.chunks.get(digest)
            if chunk is None or Tier.DISK not in chunk.tiers:
                self._verified.discard(digest)
                await self.in_thread(self.disk.delete, (digest,))
