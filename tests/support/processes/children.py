"""Forked children of this process, and the descriptors that they have."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEADLINE = 30.0


def in_child(work: Callable[[], object]) -> Any:
    """Return the result of ``work``, or the traceback of its error, in a child that ends without finalization."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            answer = work()
        except BaseException:  # noqa: BLE001  the parent reports it
            answer = traceback.format_exc()
        os.write(theirs, json.dumps(answer).encode())
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours, "rb") as pipe:
        ready, _, _ = select.select([pipe], [], [], DEADLINE)
        found = json.loads(pipe.read()) if ready else "the child hangs"
    wait(pid)
    return found


def fork_and_exit() -> int:
    """Fork a child that ends as a script does, and return its pid."""
    pid = os.fork()
    if pid == 0:
        sys.exit(7)
    return pid


def wait(pid: int) -> int | str:
    """Return the exit code of a child; negative: the signal."""
    handle = os.pidfd_open(pid)
    ended, _, _ = select.select([handle], [], [], DEADLINE)
    os.close(handle)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status) if ended else "hangs"


def sockets() -> list[str]:
    """Return the addresses of this process's TCP sockets, listening ones too."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            with socket.socket(fileno=os.dup(int(entry.name))) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6):
                    found.append(str(one.getsockname()))
        except OSError:
            continue
    return sorted(found)


def descriptors() -> int:
    """Return the number of open descriptors."""
    return len(list(Path("/proc/self/fd").iterdir()))
