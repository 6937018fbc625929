"""Fill the filesystem of a data directory with one file, and remove it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

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
    """A full filesystem: a context manager."""

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
