"""Memory for states."""

from __future__ import annotations

import mmap

import torch

HUGE_BYTES = 4 << 20
"""From here on memory is asked for in huge pages: the first write to 4 KiB pages is several times slower."""


def new_bytes(length: int, *, pinned: bool = False) -> torch.Tensor:
    """``length`` bytes on the CPU as a uint8 tensor. ``pinned``: page-locked, for copies to and from CUDA."""
    if pinned:
        return torch.empty(length, dtype=torch.uint8, pin_memory=True)
    if length < HUGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(length, dtype=torch.uint8)
    memory = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
