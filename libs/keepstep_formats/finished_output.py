"""Output that is complete or absent: written under another name, and renamed when everything is on disk."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from keepstep_formats.foreign_errors import ForeignCheckpointError


def check_free(path: Path) -> None:
    """Raise ``ForeignCheckpointError`` if ``path`` exists, or its folder does not."""
    if os.path.lexists(path):
        raise ForeignCheckpointError(f"{path} exists: remove it, or choose another path")
    if not path.absolute().parent.is_dir():
        raise ForeignCheckpointError(f"folder {path.absolute().parent} not found: create it first")


@contextmanager
def finished_output(path: Path) -> Iterator[Path]:
    """Yield the path to write a file or folder to. It becomes ``path`` at the end; after an error it is removed.

    Raises:
        ForeignCheckpointError: ``path`` exists, or its folder does not.
    """
    check_free(path)
    path = path.absolute()
    temporary = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield temporary
        for one in [temporary, *temporary.rglob("*")] if temporary.is_dir() else [temporary]:
            _sync(one)
        temporary.rename(path)
        _sync(path.parent)
    except BaseException:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)
        raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
