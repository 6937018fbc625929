"""Files and folders that are on disk when the call returns."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}
"""Errors of file systems that have no hard links."""


def write_whole(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Write a file whole or not at all. ``sync``: see ``write_file``."""
    partial = path.with_name(f"{path.name}.partial")
    write_file(partial, data, sync=sync)
    partial.replace(path)
    if sync:
        sync_folder(path.parent)


def create_whole(path: Path, data: bytes, *, sync: bool = True) -> bool:
    """Write a new file whole or not at all. Return False if it exists. Of several processes, one gets True.

    On a file system without hard links, each of several processes may get True at the same instant.
    """
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}.partial")
    try:
        write_file(partial, data, sync=sync)
        try:
            os.link(partial, path)
        except FileExistsError:
            return path.read_bytes() == data  # NFS repeats a request whose answer was lost
        except OSError as error:
            if error.errno not in NO_LINKS:
                raise
            if path.exists():
                return False
            partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    if sync:
        sync_folder(path.parent)
    return True


def write_file(path: Path, data: bytes, *, sync: bool = True) -> None:
    """Write the content of a file. Its name is on disk after ``sync_folder``. ``sync``: False: the content is not."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        if sync:
            os.fsync(file.fileno())


def make_folder(path: Path) -> list[Path]:
    """Make a folder and those above it. Return the new ones, the innermost first."""
    new = [one for one in (path, *path.parents) if not one.exists()]
    try:
        path.mkdir(parents=True, exist_ok=True)
        for one in new:
            with contextlib.suppress(PermissionError):  # a folder that may be written, but not read
                sync_folder(one.parent)
    except BaseException:
        remove_folders(new)
        raise
    return new


def remove_folders(folders: Iterable[Path]) -> None:
    """Remove folders that are empty, the innermost first."""
    with contextlib.suppress(OSError):
        for one in folders:
            one.rmdir()


def sync_folder(path: Path) -> None:
    """Bring the names of the files in a folder to disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
