"""Files with the output of each rank, for ``keepstep run --log-dir``."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

import click

from keepstep_mesh.config.disk_space import write_failure
from keepstep_mesh.config.log_limiter import LogLimiter
from keepstep_mesh.config.rotation import is_moved

NOTES = "run"
"""``run.log`` has the messages of the supervisor."""


class LogFolder:
    """Append lines to ``r0-1.log`` (group, rank) and ``run.log`` in ``folder``. All restarts of a rank share a file.

    Raises:
        click.UsageError: the folder cannot be created or written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, BinaryIO] = {}
        self._cut: set[str] = set()
        """Files that end in the middle of a line."""
        self._failures = LogLimiter(seconds=600.0)
        try:
            folder.mkdir(exist_ok=True)
            self._file(NOTES)
        except OSError as error:
            raise click.UsageError(f"--log-dir {folder} cannot be used: {error.strerror}") from error

    def line(self, group: str, rank: int, text: str) -> str | None:
        """Append a line of a rank. Return a sentence if that fails, at most every ten minutes."""
        error = self._write(f"{group}-{rank}", text)
        if error is None or not self._failures.allows(time.monotonic()):
            return None
        return f"output is missing in the files of --log-dir: {write_failure(error, self._folder)}"

    def note(self, group: str, sentence: str) -> None:
        """Append a message of the supervisor, with the time."""
        self._write(
            NOTES, f"{datetime.now().astimezone().isoformat(sep=' ', timespec='milliseconds')} {group}: {sentence}"
        )

    def close(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()

    def _write(self, name: str, text: str) -> OSError | None:
        line = text.encode(errors="replace") + b"\n"
        try:
            file = self._file(name)
            line = b"\n" + line if name in self._cut else line
            if written := file.write(line):
                self._cut.discard(name)
            if written < len(line):  # the next line must not continue what a full disk cut off
                self._cut.add(name)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            return error
        return None

    def _file(self, name: str) -> BinaryIO:
        path, file = self._folder / f"{name}.log", self._files.get(name)
        if file is None or is_moved(path, file.fileno()):
            self._files[name] = path.open("ab", buffering=0)
            self._cut.discard(name)
            if file is not None:
                file.close()
        return self._files[name]
