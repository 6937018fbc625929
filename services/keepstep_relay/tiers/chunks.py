"""The chunks of a relay, in memory, on disk and in the durable tier: immutable, named by their digest.

The order for a chunk that comes: room, bytes, digest, visible to readers, answered. It is written to disk behind that:
no reader waits for a disk, and a commit waits for all of it. While the disk does not take what it is given, each chunk
is tried before it is answered. The order for one that is asked for: wait until it is here, hold it, read and check it,
send it, let go. What the core says may go is deleted behind all that; a chunk that is wanted again in the meantime has
its turn after that.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TypeVar

from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.protocol.manifest import chunk_digest
from keepstep_relay.core.events import (
    ChunkCame,
    ChunkLetGo,
    ChunkLost,
    ChunkTaken,
    Decision,
    Drop,
    Event,
    Evict,
    Forget,
    HolderSaid,
    Key,
    RoomWanted,
    Tier,
    Wake,
)
from keepstep_relay.core.inventory import Chunk
from keepstep_relay.core.machine import RelayCore
from keepstep_relay.tiers.disk_tier import DamagedError, DiskError, DiskTier
from keepstep_relay.tiers.durable_tier import DurableError, DurableTier
from keepstep_relay.tiers.locks import KeyedLock, Notifier
from keepstep_relay.tiers.memory_tier import MemoryTier

T = TypeVar("T")

THREADS = 4
"""That read, write and hash."""
WRITERS = 2
FLUSH_SECONDS = 5.0
"""At the end, for what was taken and is not written yet."""
ROOM_SECONDS = 5.0
"""A request waits so long for memory."""

log = get_logger("keepstep.relay.chunks")


class GoneError(Exception):
    """A chunk that will not come."""


class ChunkStore:
    """``disk`` and ``durable``: None where there is none. ``running`` must be open while it is used."""

    def __init__(
        self, core: RelayCore, memory_bytes: int, disk: DiskTier | None = None, durable: DurableTier | None = None
    ) -> None:
        self.core = core
        self.memory = MemoryTier(memory_bytes, lambda size: self.make_room(size))  # noqa: PLW0108 - another takes its place
        self.disk = disk
        self.durable = durable
        self.bells = Notifier()
        self.turns = KeyedLock()
        self.times_changed = asyncio.Event()
        """The core may name an earlier deadline than before."""
        self.damaged: Counter[str] = Counter()
        """Chunks with a wrong digest, by where they came from."""
        self.evicted = 0
        self.make_room: Callable[[int], object] = lambda size: self.step(RoomWanted(size))
        self.forget: Callable[[Key], Awaitable[None]]
        """Deletes what was written down of a checkpoint."""
        self.disk_trouble: str | None = None
        """Why the disk did not take what it was last given."""
        self._to_write: asyncio.Queue[bytes] = asyncio.Queue()
        self._verified: set[bytes] = set()
        """On disk, and known to be good since this process began."""
        self._to_sweep: asyncio.Queue[Drop | Forget | asyncio.Future[None]] = asyncio.Queue()
        self._threads: ThreadPoolExecutor

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        with ThreadPoolExecutor(THREADS, thread_name_prefix="keepstep-relay") as self._threads:
            tasks = [asyncio.create_task(self._sweep(), name="keepstep relay sweeper")]
            tasks += [asyncio.create_task(self._write(), name="keepstep relay writer") for _ in range(WRITERS)]
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

    def step(self, event: Event) -> list[Decision]:
        """Tells the core, and carries out what it decides about chunks; the rest is the caller's to carry out."""
        rest: list[Decision] = []
        if isinstance(event, (HolderSaid, ChunkLost)):
            self.times_changed.set()
        for decision in self.core.step(event, time.monotonic()):
            match decision:
                case Wake(what):
                    for one in what:
                        self.bells.ring(one)
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

    async def put(self, digest: bytes, data: memoryview) -> None:
        """Takes a chunk for which memory was reserved. Raises ``DamagedError`` for a wrong digest, which is not kept.

        ``DiskError`` when it is held in memory, and served, but the disk takes nothing.
        """
        try:
            found = await self.in_thread(chunk_digest, data)
        except BaseException:
            self.memory.release(data.nbytes)
            raise
        if found != digest:
            self.memory.release(data.nbytes)
            self.damaged["upload"] += 1
            raise DamagedError(f"the digest of these {data.nbytes} bytes is {found.hex()}, not {digest.hex()}")
        if self.core.is_here(digest) and digest not in self.memory.chunks:
            self.memory.release(data.nbytes)
        else:
            self.memory.put(digest, data)
            self.step(ChunkCame(digest, Tier.MEMORY))
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
                log.error("chunk is in memory only", digest=digest.hex(), reason=str(error))
            except Exception:
                log.exception("fault while writing", digest=digest.hex())
            finally:
                self._to_write.task_done()

    async def save(self, digest: bytes) -> None:
        """Writes a chunk that is in memory only. Raises ``DiskError``."""
        if self.disk is None:
            return
        async with self.turns(digest):
            chunk, data = self.core.chunks.get(digest), self.memory.chunks.get(digest)
            if chunk is None or data is None or Tier.DISK in chunk.tiers:
                return
            try:
                await self.in_thread(self.disk.write, digest, data)
            except DiskError as error:
                self.disk_trouble = str(error)
                raise
            self.disk_trouble = None
            if self.core.chunks.get(digest) is chunk:
                self._verified.add(digest)
                self.step(ChunkCame(digest, Tier.DISK))
                self.memory.look_again()
            else:
                self._to_sweep.put_nowait(Drop((digest,)))

    async def make_last(self, digests: tuple[bytes, ...]) -> None:
        """Has all of them on disk, verified and synced. Raises ``DamagedError`` or ``DiskError``."""
        if self.disk is None:
            return
        for digest in digests:
            chunk = self.core.chunks[digest]
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
        except DamagedError:
            self._damaged_on_disk(digest)
            raise
        self._verified.add(digest)

    # ---- readers

    @asynccontextmanager
    async def reading(self, digest: bytes, seconds: float) -> AsyncIterator[memoryview]:
        """The bytes of a chunk, as soon as it is here; they are held meanwhile.

        Raises ``TimeoutError`` when it did not come within ``seconds``, ``GoneError`` when it will not come,
        ``MemoryFullError``, ``DiskError``.
        """
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            await self._arrival(digest, deadline)
            self.step(ChunkTaken(digest))
            try:
                data = await self._bytes(digest)
                if data is not None:
                    yield data
                    return
            finally:
                self.step(ChunkLetGo(digest))
                self.memory.look_again()

    async def _arrival(self, digest: bytes, deadline: float) -> None:
        while not self.core.is_here(digest):
            if not self.core.to_come(digest):
                raise GoneError(f"chunk {digest.hex()} is not here, and no upload is under way that would bring it")
            await self.bells.wait(digest, deadline)

    async def _bytes(self, digest: bytes) -> memoryview | None:
        """None: it was damaged wherever it was."""
        if (data := self.memory.chunks.get(digest)) is not None:
            return data
        async with self.turns((digest, "load")):
            if (data := self.memory.chunks.get(digest)) is not None:
                return data
            chunk = self.core.chunks[digest]
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
            self.step(ChunkCame(digest, Tier.MEMORY))
            return data

    async def _load(self, digest: bytes, chunk: Chunk) -> memoryview | None:
        if self.disk is not None and Tier.DISK in chunk.tiers:
            try:
                data = self.memory.buffer(chunk.length)
                await self.in_thread(self.disk.read, digest, data)
                self._verified.add(digest)
                return data
            except DamagedError:
                self._damaged_on_disk(digest)
        if self.durable is not None and Tier.DURABLE in chunk.tiers:
            try:
                users = sorted(key for key, _ in chunk.users)
                return await self.in_thread(self.durable.read, users, digest, chunk.length)
            except (DamagedError, DurableError) as error:
                self.damaged["durable"] += 1
                log.error("chunk in the durable tier is not usable", digest=digest.hex(), reason=str(error))
                self.step(ChunkLost(digest, Tier.DURABLE))
        return None

    def _damaged_on_disk(self, digest: bytes) -> None:
        """It is not served, and whoever has it may upload it again."""
        self.damaged["disk"] += 1
        log.error("chunk on disk is damaged; it is dropped", digest=digest.hex())
        self._verified.discard(digest)
        self.step(ChunkLost(digest, Tier.DISK))
        self._to_sweep.put_nowait(Drop((digest,)))

    # ---- room

    async def settled(self) -> None:
        """Returns when everything that was to be deleted by now is."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._to_sweep.put_nowait(done)
        await done

    async def _sweep(self) -> None:
        while True:
            work = await self._to_sweep.get()
            try:
                match work:
                    case Drop(digests):
                        for digest in digests:
                            await self._delete(digest)
                    case Forget(key):
                        await self.forget(key)
                    case asyncio.Future() as settled if not settled.done():
                        settled.set_result(None)
            except (OSError, DiskError, DurableError) as error:
                log.error("could not be deleted", what=repr(work)[:200], reason=str(error))
            except Exception:
                log.exception("fault while deleting", what=repr(work)[:200])

    async def _delete(self, digest: bytes) -> None:
        if self.disk is None:
            return
        async with self.turns(digest):
            chunk = self.core.chunks.get(digest)
            if chunk is None or Tier.DISK not in chunk.tiers:
                self._verified.discard(digest)
                await self.in_thread(self.disk.delete, (digest,))
