"""Files with the output of each rank, for ``keepstep run --log-dir``."""

from __future__ import annotations

import contextlib
from datetime import datetime
from pathlib import Path
from typing import BinaryIO

import click

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
        self._fails = False
        try:
            folder.mkdir(exist_ok=True)
            self._file(NOTES)
        except OSError as error:
            raise click.UsageError(f"--log-dir {folder} cannot be used: {error.strerror}") from error

    def line(self, group: str, rank: int, text: str) -> str | None:
        """Append a line of a rank. Return a sentence if that fails, once until it works again."""
        return self._write(f"{group}-{rank}", text)

    def note(self, group: str, sentence: str) -> None:
        """Append a message of the supervisor, with the time."""
        self._write(
            NOTES, f"{datetime.now().astimezone().isoformat(sep=' ', timespec='milliseconds')} {group}: {sentence}"
        )

    def close(self) -> None:
        for file in self._files.values():
            with contextlib.suppress(OSError):
                file.close()

    def _write(self, name: str, text: str) -> str | None:
        try:
            self._file(name).write(text.encode(errors="replace") + b"\n")
        except OSError as error:
            failed_before, self._fails = self._fails, True
            return (
                None
                if failed_before
                else f"cannot write to {self._folder} ({error.strerror}): output is missing in its files"
            )
        self._fails = False
        return None

    def _file(self, name: str) -> BinaryIO:
        path, file = self._folder / f"{name}.log", self._files.get(name)
        if file is None or is_moved(path, file.fileno()):
            self._files[name] = path.open("ab", buffering=0)
            if file is not None:
                file.close()
        return self._files[name]
