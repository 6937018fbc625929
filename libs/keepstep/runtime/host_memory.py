"""Main memory that this process can still use: of the machine, and of the control groups of a container."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

UNLIMITED = 1 << 62


def available_bytes(root: Path = Path("/")) -> int:
    """Return the memory available without swapping; ``UNLIMITED`` if the system does not report it.

    Args:
        root: folder with ``proc`` and ``sys``, for tests.
    """
    return min(_of_machine(root), *_of_groups(root), UNLIMITED)


def ranks_of_host() -> int:
    """Return the number of ranks of this group on this machine, which its launcher sets; 1 if it is unknown."""
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(told) if told.isdecimal() and int(told) else 1


def _of_machine(root: Path) -> int:
    for line in _lines(root / "proc/meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return UNLIMITED


def _of_groups(root: Path) -> Iterator[int]:
    """Yield what each memory control group of this process leaves. A group limits its children too."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        limit_name, used_name, cache_name = names if controllers else ("memory.max", "memory.current", "inactive_file")
        group = mount / path.lstrip("/")
        for folder in (group, *group.parents):  # in a container the path may be that of the host: then only the mount
            limit, used = _number(folder / limit_name), _number(folder / used_name)
            if limit is not None and used is not None:
                yield max(0, limit - used + _reclaimable(folder / "memory.stat", cache_name))
            if folder == mount:
                break


def _reclaimable(stat: Path, name: str) -> int:
    """Return the page cache that the kernel drops before it refuses memory."""
    return next((int(line.split()[1]) for line in _lines(stat) if line.split()[:1] == [name]), 0)


def _number(file: Path) -> int | None:
    """Return the number in ``file``; None: the file is missing, or the limit is ``max``."""
    text = "".join(_lines(file)).strip()
    return int(text) if text.isdecimal() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
