"""Facts that a child inherits of this process, and facts of files that imports read, to notice that they changed."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable
from pathlib import Path

Facts = dict[str, object]


def inherited() -> Facts:
    """Return the facts that a child inherits of this process, by name."""
    status = Path("/proc/self/status").read_text()
    limits = {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if name.startswith("RLIMIT_")}
    try:
        folder: object = Path().stat().st_ino, Path.cwd()
    except FileNotFoundError:
        folder = None
    return {
        "the current folder": folder,
        "the umask": next((line for line in status.splitlines() if line.startswith("Umask:")), ""),
        "a resource limit": limits,
        "the processors that it may use": os.sched_getaffinity(0),
        "the priority": (os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)),
        "the control group": _text(Path("/proc/self/cgroup")),
        "the user or groups": (os.getresuid(), os.getresgid(), os.getgroups()),
        "the score for the end at too little memory": _text(Path("/proc/self/oom_score_adj")),
    }


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def difference(before: Facts, after: Facts) -> str | None:
    """Return the name of the first fact that differs."""
    return next((name for name, value in before.items() if after.get(name) != value), None)


def signature(path: str) -> tuple[int, int] | None:
    """Return mtime in ns and size of a file; None: it cannot be found."""
    try:
        found = os.stat(path)  # noqa: PTH116 - for many files
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def installations(paths: Iterable[str]) -> Facts:
    """Return the distributions in each folder of installations among ``paths``, with the time of their change."""
    found: Facts = {}
    for path in paths:
        if path.endswith(("site-packages", "dist-packages")):
            try:
                with os.scandir(path) as entries:
                    found[path] = {
                        one.name: one.stat().st_mtime_ns
                        for one in entries
                        if one.name.endswith((".dist-info", ".egg-info"))
                    }
            except OSError:
                found[path] = None
    return found
