"""Free torch's backends without blocking the caller, and before the process ends."""

from __future__ import annotations

import atexit
import time

from torch.distributed.distributed_c10d import Backend

from keepstep.runtime.late_threads import start_or_run
from keepstep_mesh.threads.starting import Thread

DISPOSAL_SECONDS = 2.0
"""Limit of the wait, at the end of the process, for backends that are being freed."""

_disposals: set[Thread] = set()


def dispose(backend: list[Backend | None]) -> None:
    """Free a backend in a thread: torch's destructor waits 20 ms for its own thread, and for sleeping operations."""

    def free() -> None:
        backend.clear()
        _disposals.discard(thread)

    thread = Thread(target=free, name="keepstep-disposal", daemon=True)
    _disposals.add(thread)
    start_or_run(thread)


@atexit.register
def _await_disposals() -> None:
    """Wait for these threads: C++ aborts the process if a thread returns into an interpreter that has ended."""
    deadline = time.monotonic() + DISPOSAL_SECONDS
    for thread in tuple(_disposals):
        thread.join(max(0.0, deadline - time.monotonic()))
