"""Free torch's backends, and the connections of finished ones, without blocking the caller, and before the process
ends.
"""

from __future__ import annotations

import atexit
import select
import socket
import time
from collections.abc import Sequence

from torch.distributed.distributed_c10d import Backend

from keepstep.runtime.late_threads import start_or_run
from keepstep_mesh.threads.starting import Thread

DISPOSAL_SECONDS = 2.0
"""Limit of the wait, at the end of the process, for backends that are being freed; and for peers that still read."""

_disposals: set[Thread] = set()


def dispose(backend: list[Backend | None], ended: Sequence[socket.socket] = ()) -> None:
    """Free a backend in a thread: torch's destructor waits 20 ms for its own thread, and for sleeping operations.

    Args:
        backend: the backend alone. The list is empty afterwards.
        ended: connections of the backend that send no more. Each is closed after its peer has closed, or after
            ``DISPOSAL_SECONDS``.
    """

    def free() -> None:
        backend.clear()
        _close_after_peers(ended)
        _disposals.discard(thread)

    thread = Thread(target=free, name="keepstep-disposal", daemon=True)
    _disposals.add(thread)
    start_or_run(thread)


def _close_after_peers(ended: Sequence[socket.socket]) -> None:
    deadline = time.monotonic() + DISPOSAL_SECONDS
    for connection in ended:
        with connection:
            poll = select.poll()
            poll.register(connection, select.POLLRDHUP)
            poll.poll(max(0.0, deadline - time.monotonic()) * 1000)


@atexit.register
def _await_disposals() -> None:
    """Wait for these threads: C++ aborts the process if a thread returns into an interpreter that has ended."""
    deadline = time.monotonic() + DISPOSAL_SECONDS
    for thread in tuple(_disposals):
        thread.join(max(0.0, deadline - time.monotonic()))
