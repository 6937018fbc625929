"""Writing the pack of a rank to a file: hashed part by part, and brought to disk while it is written.

Each part is hashed and then written from the cache of the processor, out of the memory of its tensors. The kernel
begins to write back what was written, so that little is left for the last ``fsync``.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from keepstep.state.pack import Pack
from keepstep_mesh.protocol.manifest import PackHasher, cut_pieces, part_size
from keepstep_mesh.threads.starting import ThreadPoolExecutor

WRITEBACK_BYTES = 32 << 20
"""Bytes between two requests to the kernel to write back."""
MAX_PIECES = 64
"""More pieces of one write are joined: the kernel accepts 1024."""
_WRITE = 2
"""``SYNC_FILE_RANGE_WRITE`` of Linux: begin to write back, and do not wait."""


def write_pack(pack: Pack, path: Path, check: Callable[[], object], *, sync: bool) -> PackHasher:
    """Write a pack, and return its digests.

    Args:
        pack: its bytes.
        path: the file, which is replaced.
        check: called before each chunk; it raises to end the save.
        sync: whether the file is on disk when this returns.
    """
    hasher, size, written, begun = PackHasher(pack.nbytes), part_size(pack.nbytes), 0, 0
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(1, "keepstep-writeback") as pool:
        descriptor = file.fileno()
        for number in range(pack.chunks):
            check()
            for part in cut_pieces(pack.pieces(number), size):
                hasher.add_part(part)
                written += _write(descriptor, part)
            hasher.end_chunk()
            if sync and written - begun >= WRITEBACK_BYTES:
                pool.submit(_begin_writeback, descriptor, begun, written - begun)
                begun = written
        pool.shutdown()
        if sync:
            os.fsync(descriptor)
    return hasher


def _write(descriptor: int, pieces: Sequence[memoryview]) -> int:
    """Write all pieces, and return their bytes."""
    left = list(pieces) if len(pieces) <= MAX_PIECES else [memoryview(b"".join(pieces))]
    total = sum(piece.nbytes for piece in left)
    while left:
        done = os.writev(descriptor, left)
        while left and done >= left[0].nbytes:
            done -= left.pop(0).nbytes
        if done:
            left[0] = left[0][done:]
    return total


def _begin_writeback(descriptor: int, start: int, length: int) -> None:
    """Let the kernel begin to write a range of a file back. Without effect where it cannot: ``fsync`` writes it."""
    if _sync_file_range is not None:
        _sync_file_range(descriptor, start, length, _WRITE)


def _find_sync_file_range() -> Callable[[int, int, int, int], int] | None:
    found = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if found is not None:
        found.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return found


_sync_file_range = _find_sync_file_range()
