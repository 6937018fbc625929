"""Let a process run out of memory, or out of space in its data directory."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
from collections.abc import Iterator, Sequence
from pathlib import Path

from keepstep_chaos.observing.process_table import GONE, PAGE_BYTES, PROC

LARGEST_BYTES = 1 << 30
"""Of a filesystem that is filled without being asked for."""
NAME = "keepstep-chaos-fill"
PIECES = (1 << 20, 1 << 12, 1)
"""Bytes of the writes: the last ones are small, so that no space is left."""


def why_not(folder: Path | None, *, shared: bool) -> str | None:
    """Return why the disk of ``folder`` is not filled; None: it may be. ``shared``: other users may be on it."""
    if folder is None or not folder.is_dir():
        return "it has no data directory"
    if shared:
        return None
    if folder.stat().st_dev == Path("/").stat().st_dev:
        return f"{folder} is on the root filesystem; pass --fill-shared-disks to fill it"
    facts = os.statvfs(folder)
    if (size := facts.f_frsize * facts.f_blocks) > LARGEST_BYTES:
        limit = LARGEST_BYTES >> 20
        return f"{folder} is on a filesystem of {size >> 20} MiB (limit {limit}); pass --fill-shared-disks to fill it"
    return None


class FullDisk:
    """A filesystem that one file fills, which the end removes: a context manager."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._stopped = False

    def stop(self) -> None:
        """End ``__enter__`` early, in another thread, before the filesystem is full."""
        self._stopped = True

    def __enter__(self) -> None:
        try:
            with self._path.open("wb", buffering=0) as file:
                for size in PIECES:
                    self._fill(file.fileno(), bytes(size))
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        self._path.unlink(missing_ok=True)

    def _fill(self, file: int, piece: bytes) -> None:
        while not self._stopped:
            try:
                if os.write(file, piece) < len(piece):
                    return
            except OSError as error:
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    return
                raise


@contextlib.contextmanager
def memory_limited(pids: Sequence[int]) -> Iterator[None]:
    """Let the next allocation of new memory fail: set the soft limit of each address space to its present size.

    Memory that a process has freed inside of itself stays usable for it. The end sets the limits back.
    """
    before: dict[int, tuple[int, int]] = {}
    try:
        for pid in pids:
            with contextlib.suppress(*GONE):
                size = int((PROC / str(pid) / "statm").read_text().split()[0]) * PAGE_BYTES
                hard = resource.prlimit(pid, resource.RLIMIT_AS)[1]
                before[pid] = resource.prlimit(pid, resource.RLIMIT_AS, (size, hard))
        yield
    finally:
        for pid, limits in before.items():
            with contextlib.suppress(*GONE):
                resource.prlimit(pid, resource.RLIMIT_AS, limits)
