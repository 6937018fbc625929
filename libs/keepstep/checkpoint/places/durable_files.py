"""Files and folders that are on disk when the call returns."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(f"{path.name}.partial")
    write_file(partial, data)
    partial.replace(path)
    sync_folder(path.parent)


def write_file(path: Path, data: bytes) -> None:
    """Write the content of a file. Its name is on disk after ``sync_folder``."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def make_folder(path: Path) -> list[Path]:
    """Make a folder and those above it. Return the new ones, the innermost first."""
    new = [one for one in (path, *path.parents) if not one.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for one in new:
        with contextlib.suppress(PermissionError):  # a folder that may be written, but not read
            sync_folder(one.parent)
    return new


def sync_folder(path: Path) -> None:
    """Bring the names of the files in a folder to disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
