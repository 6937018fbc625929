"""The memory tier: chunks as they are sent, within a limit that counts what is being received, too.

Memory of chunks that go is used again: where the kernel has to find new pages, writing to them is what takes longest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.protocol.manifest import CHUNK_BYTES


class MemoryFullError(KeepstepError):
    """No room became free in time."""


class MemoryTier:
    """``limit``: bytes. ``make_room(size)`` gives chunks back, if any can be spared."""

    def __init__(self, limit: int, make_room: Callable[[int], object]) -> None:
        self.limit = limit
        self.used = 0
        """Bytes that are held or reserved."""
        self.chunks: dict[bytes, memoryview] = {}
        self._make_room = make_room
        self._spare: list[bytearray] = []
        """Of the size of a whole chunk, and nobody looks at them any more."""
        self._freed = asyncio.Event()

    async def reserve(self, size: int, seconds: float) -> None:
        """Waits for room. To be followed by ``put`` or ``release``. Raises ``MemoryFullError``."""
        if size > self.limit:
            raise MemoryFullError(f"{size} bytes do not fit into a memory tier of {self.limit} bytes (--memory)")
        try:
            async with asyncio.timeout(seconds):
                while self.used + size > self.limit:
                    self._make_room(self.used + size - self.limit)
                    if self.used + size > self.limit:
                        self._freed.clear()
                        await self._freed.wait()
        except TimeoutError:
            raise MemoryFullError(
                f"the memory tier is full: all of its {self.limit} bytes are needed by uploads and transfers, or by "
                f"checkpoints that no other tier has; give the relay more (--memory), a disk (--data-dir), or remove "
                f"checkpoints"
            ) from None
        self.used += size
        del self._spare[max(0, (self.limit - self.used) // CHUNK_BYTES) :]

    def buffer(self, size: int) -> memoryview:
        """Memory of ``size`` bytes that were reserved, with anything in it."""
        return memoryview(self._spare.pop() if size == CHUNK_BYTES and self._spare else bytearray(size))

    def hold(self, size: int) -> None:
        """What is here already counts, whatever the limit."""
        self.used += size

    def look_again(self) -> None:
        """Something may have become possible to spare."""
        self._freed.set()

    def release(self, size: int) -> None:
        self.used -= size
        self._freed.set()

    def put(self, digest: bytes, data: memoryview) -> None:
        """``data`` was reserved for. One that is there already stays."""
        if digest in self.chunks:
            self.release(data.nbytes)
        else:
            self.chunks[digest] = data

    def drop(self, digest: bytes) -> None:
        """Who sends it now still may: the bytes go when the last has let go."""
        data = self.chunks.pop(digest, None)
        if data is None:
            return
        self.release(data.nbytes)
        buffer, whole = data.obj, data.nbytes == CHUNK_BYTES
        del data
        if whole and isinstance(buffer, bytearray) and _is_free(buffer):
            self._spare.append(buffer)


def _is_free(buffer: bytearray) -> bool:
    """Whether nothing refers to its memory, such as a connection on which it is still being sent."""
    try:
        buffer.append(buffer.pop())
    except BufferError:
        return False
    return True
