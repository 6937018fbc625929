"""Memory that the processes of one relay share: slots of the size of a full chunk."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from keepstep_mesh.protocol.manifest import CHUNK_BYTES


class Place(NamedTuple):
    """Where bytes are in the shared memory."""

    slot: int
    start: int
    """Within the slot."""


class _Slot(ctypes.c_char * CHUNK_BYTES):  # type: ignore[misc]
    """The bytes of a slot. ``on_free`` is called when no buffer refers to them any more."""

    number: int
    on_free: Callable[[], object] = staticmethod(lambda: None)

    def __del__(self) -> None:
        self.on_free()


class SharedSlots:
    """Slots in a file in memory, which other processes open by its descriptor. Each slot gets memory at its first use.

    Args:
        count: Number of slots.
        descriptor: A file of another process; default: a new one. ``close`` closes it.
    """

    def __init__(self, count: int, descriptor: int | None = None) -> None:
        if descriptor is None:
            descriptor = os.memfd_create("keepstep-relay", os.MFD_CLOEXEC)
            os.ftruncate(descriptor, count * CHUNK_BYTES)
        self.count = count
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, count * CHUNK_BYTES)
        self._fresh = deque(range(count))
        """Free slots without memory."""
        self._used = deque[int]()
        """Free slots that have memory; the last one was used last."""

    def close(self) -> None:
        """Close the file. Its memory lives until the last buffer that refers to it is gone."""
        os.close(self.descriptor)

    def take(self) -> memoryview | None:
        """Return a free slot, with any content; None: all are in use."""
        free = self._used or self._fresh
        if not free:
            return None
        number = free.pop()
        return self.view(number, partial(self._used.append, number))

    def trim(self, keep: int) -> None:
        """Return the memory of all but ``keep`` free slots to the kernel."""
        while len(self._used) > max(0, keep):
            number = self._used.popleft()
            self._memory.madvise(mmap.MADV_REMOVE, number * CHUNK_BYTES, CHUNK_BYTES)
            self._fresh.append(number)

    def view(self, number: int, on_free: Callable[[], object]) -> memoryview:
        """Return the bytes of a slot. ``on_free`` is called when no buffer refers to them any more."""
        slot = _Slot.from_buffer(self._memory, number * CHUNK_BYTES)
        slot.number, slot.on_free = number, on_free
        return memoryview(slot).cast("B")


def place_of(data: memoryview) -> Place | None:
    """Return where ``data`` is; None: not in a slot."""
    slot = data.obj
    if not isinstance(slot, _Slot) or not data.nbytes:
        return None
    return Place(slot.number, ctypes.addressof(ctypes.c_char.from_buffer(data)) - ctypes.addressof(slot))
