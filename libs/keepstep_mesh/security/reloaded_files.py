"""What is made of files and made again when they change: tokens, certificates.

A new file that is broken is reported, once, and what was made of the old one stays.
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
    """``value`` is what ``read`` made of ``files``. Methods may be called from any thread.

    ``what``: a word for logs. Whatever ``read`` raises the first time is the caller's.
    """

    def __init__(self, what: str, files: Iterable[Path], read: Callable[[], T]) -> None:
        self._what = what
        self.files = tuple(files)
        self._read = read
        self._lock = threading.Lock()
        self._stamps = self._look()
        self.value = read()

    def refresh(self, *, force: bool = False) -> bool:
        """Reads again if a file has changed since, or by ``force``. Whether there is a new value. Never raises."""
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
    """Differs when the file was written or replaced; symbolic links (as Kubernetes mounts secrets) are followed."""
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
