"""Logs that another program rotates, such as logrotate."""

from __future__ import annotations

import os
from pathlib import Path


def is_moved(path: str | os.PathLike[str], descriptor: int) -> bool:
    """Return whether the open file ``descriptor`` is no longer at ``path``: it was renamed or deleted."""
    try:
        return not os.path.samestat(Path(path).stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return True
