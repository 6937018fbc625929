"""Words for a write that failed, with the free space of its disk if that is full."""

from __future__ import annotations

import errno
import os
from pathlib import Path

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
"""Error numbers of a full disk, a used-up quota, and a limit on file sizes."""


def write_failure(error: OSError, path: Path) -> str:
    """Return why a write to ``path`` failed, and what to do if its disk is full."""
    reason = error.strerror or str(error)
    return f"{reason}: {free_space(path)}" if error.errno in FULL else reason


def free_space(path: Path) -> str:
    """Return the free bytes of the disk of ``path``, and what to do."""
    place = next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())
    facts = os.statvfs(place)
    free, size = facts.f_bavail * facts.f_frsize, facts.f_blocks * facts.f_frsize
    return f"{free} of {size} bytes are free on the disk of {path}; free space there"
