"""Values read from files, and reloaded when the files change: tokens, certificates.

An invalid new file is logged once; the old value stays in use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Generic, TypeVar

from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import KeepstepError

T = TypeVar("T")

log = get_logger("keepstep.reloading")

Stamp = tuple[int, int, int] | None


class ReloadedFiles(Generic[T]):
    """Parsed files that are read again when they change. Methods may be called from any thread.

    Args:
        what: name of the files in logs.
        files: files to watch.
        read: reads the files and returns the value to keep in ``value``; the constructor passes on its errors.
    """

    def __init__(self, what: str, files: Iterable[Path], read: Callable[[], T]) -> None:
        self._what = what
        self.files = tuple(files)
        self._read = read
        self._lock = threading.Lock()
        self._stamps = self._look()
        self.value = read()

    def refresh(self, *, force: bool = False) -> bool:
        """Reload if a file has changed, or if ``force``. Return whether the value is new. Never raises."""
        with self._lock:
            stamps = self._look()
            if not self.files or (stamps == self._stamps and not force):
                return False
            self._stamps = stamps
            files = ", ".join(map(str, self.files))
            try:
                self.value = self._read()
            except (KeepstepError, OSError, ValueError) as error:
                log.error(
                    "new file not taken; the old one still counts", what=self._what, files=files, error=str(error)
                )
                return False
        log.info("read again", what=self._what, files=files)
        return True

    def _look(self) -> tuple[Stamp, ...]:
        return tuple(map(_stamp, self.files))


def _stamp(file: Path) -> Stamp:
    """Return a value that changes when the file is written or replaced. Follows symbolic links, as in Kubernetes."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
