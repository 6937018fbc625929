"""The C library's memory allocator, told what a relay does: take and free buffers of a few hundred KiB all the time.

As it comes it asks the kernel for each of them and gives it back, and finding new pages costs more than all copying: a
third of the relay's processor time while it receives.
"""

from __future__ import annotations

import ctypes

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
KEPT_BYTES = 64 << 20
"""Freed memory that is kept for the next buffer."""
LARGE_BYTES = 4 << 20
"""What is larger, such as a chunk, is still had from the kernel and given back."""


def keep_freed_memory() -> None:
    """For the whole process. Does nothing where the C library is not glibc."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, LARGE_BYTES)
        mallopt(M_TRIM_THRESHOLD, KEPT_BYTES)
