"""The memory tier: chunks in memory, within a limit that includes chunks in flight.

Buffers of dropped chunks are used again, because the page faults of fresh memory cost more than the copy.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
from collections.abc import Callable

from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.protocol.manifest import CHUNK_BYTES
from keepstep_relay.tiers.shared_slots import SharedSlots


class MemoryFullError(KeepstepError):
    """Memory did not become free in time."""


class MemoryTier:
    """``limit``: bytes. ``make_room(size)`` evicts chunks, as far as possible."""

    def __init__(self, limit: int, make_room: Callable[[int], object]) -> None:
        self.limit = limit
        self.used = 0
        """Bytes held or reserved."""
        self.chunks: dict[bytes, memoryview] = {}
        self._make_room = make_room
        self._spare: list[bytearray] = []
        """Unused buffers of the size of a full chunk."""
        self.slots: SharedSlots | None = None
        """Preferred for full chunks. Set it before the first one."""
        self._freed = asyncio.Event()

    async def reserve(self, size: int, seconds: float) -> None:
        """Wait for memory; call ``put`` or ``release`` afterwards. Raises ``MemoryFullError``."""
        if size > self.limit:
            raise MemoryFullError(f"{size} bytes exceed the memory tier (limit {self.limit} bytes, --memory)")
        try:
            async with asyncio.timeout(seconds):
                while self.used + size > self.limit:
                    self._make_room(self.used + size - self.limit)
                    if self.used + size > self.limit:
                        self._freed.clear()
                        await self._freed.wait()
        except TimeoutError:
            raise MemoryFullError(
                f"memory tier full: uploads, transfers and checkpoints in no other tier need all {self.limit} bytes; "
                f"raise --memory, add a disk (--data-dir), or remove checkpoints (keepstep checkpoint rm)"
            ) from None
        self.used += size
        spare = (self.limit - self.used) // CHUNK_BYTES + (size == CHUNK_BYTES)  # the caller takes one of them
        del self._spare[max(0, spare) :]
        if self.slots is not None:
            self.slots.trim(spare)

    def buffer(self, size: int) -> memoryview:
        """Return an uninitialized buffer for ``size`` reserved bytes."""
        if self.slots is not None and size == CHUNK_BYTES and (slot := self.slots.take()) is not None:
            return slot
        if size != CHUNK_BYTES:
            return memoryview(bytearray(size))
        buffer = self._spare.pop() if self._spare else bytearray(size + mmap.PAGESIZE)
        start = -ctypes.addressof(ctypes.c_char.from_buffer(buffer)) % mmap.PAGESIZE
        return memoryview(buffer)[start : start + size]  # the disk tier writes it past the cache of the system

    def hold(self, size: int) -> None:
        """Count bytes that are already in memory, even beyond the limit."""
        self.used += size

    def look_again(self) -> None:
        """Wake the waiting reservations: an eviction may be possible now."""
        self._freed.set()

    def release(self, size: int) -> None:
        self.used -= size
        self._freed.set()

    def put(self, digest: bytes, data: memoryview) -> None:
        """Store a chunk whose bytes were reserved. A chunk that is already here stays."""
        if digest in self.chunks:
            self.release(data.nbytes)
        else:
            self.chunks[digest] = data

    def drop(self, digest: bytes) -> None:
        """Drop a chunk. Its buffer lives until the last connection that sends it is done."""
        data = self.chunks.pop(digest, None)
        if data is None:
            return
        self.release(data.nbytes)
        buffer, whole = data.obj, data.nbytes == CHUNK_BYTES
        del data
        if whole and isinstance(buffer, bytearray) and _is_free(buffer):
            self._spare.append(buffer)


def _is_free(buffer: bytearray) -> bool:
    """Whether no other object, such as a sending connection, uses the buffer."""
    try:
        buffer.append(buffer.pop())
    except BufferError:
        return False
    return True
