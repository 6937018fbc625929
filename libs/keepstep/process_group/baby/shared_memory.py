"""Anonymous shared memory for the tensors of a child process.

A segment is a memfd: it has no name in the file system, and it is gone when its last process is.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Sequence

import torch

ALIGNMENT = 64
"""Alignment of each tensor in a segment, in bytes."""
MIN_SEGMENT_BYTES = 1 << 16
MAX_IDLE = 8
"""Limit of the segments that a pool keeps for later operations."""
WASTE = 4
"""A pool reuses a segment of at most so many times the size asked for."""

_ids = itertools.count()


class Segment:
    """A piece of memory that two processes map.

    Args:
        descriptor: of the memfd. The segment keeps a copy of it.
        size: in bytes.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.id = next(_ids)
        self.size = size
        self._bytes = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)

    def tensor(self, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        """Return the memory at ``offset`` as a contiguous tensor."""
        size = torch.Size(shape).numel() * dtype.itemsize
        if offset < 0 or offset + size > self.size:
            raise ValueError(f"tensor at bytes {offset} to {offset + size} is outside of its segment of {self.size}")
        return self._bytes[offset : offset + size].view(dtype).view(torch.Size(shape))


def new_segment(size: int) -> tuple[Segment, int]:
    """Return a segment of at least ``size`` bytes, and its descriptor, which the caller closes."""
    size = max(MIN_SEGMENT_BYTES, 1 << (size - 1).bit_length())
    descriptor = os.memfd_create("keepstep", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, size)
    return Segment(descriptor, size), descriptor


class SegmentPool:
    """Segments that no operation uses, kept for the next ones."""

    def __init__(self) -> None:
        self._idle: list[Segment] = []

    def take(self, size: int) -> Segment | None:
        """Return a segment of at least ``size`` bytes; None if the pool has none."""
        fitting = [one for one in self._idle if size <= one.size <= max(WASTE * size, MIN_SEGMENT_BYTES)]
        if not fitting:
            return None
        best = min(fitting, key=lambda one: one.size)
        self._idle.remove(best)
        return best

    def give_back(self, segment: Segment) -> list[Segment]:
        """Keep a segment. Return the segments that the pool drops in its place."""
        self._idle.append(segment)
        dropped, self._idle = self._idle[:-MAX_IDLE], self._idle[-MAX_IDLE:]
        return dropped


def aligned(size: int) -> int:
    """Round ``size`` up to a multiple of ``ALIGNMENT``."""
    return -(-size // ALIGNMENT) * ALIGNMENT
