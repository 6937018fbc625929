"""One configuration of a process group on one of torch's backends, and the operations in flight on it.

The first failure ends a communicator: it closes its connections, so that operations in flight end within a millisecond
and every peer notices at once. ``backend_work`` has the operations. Their waits notice the loss of a peer that Gloo
does not report; for operations with a future, in which no thread waits, a thread of the communicator notices it.
"""

from __future__ import annotations

import os
import socket
import threading
import weakref
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Any, Protocol, cast

from torch.distributed.distributed_c10d import Backend, Work

from keepstep.process_group.group_errors import ProcessGroupError
from keepstep.process_group.torch_backends.disposal import dispose
from keepstep.runtime.exits import must_succeed
from keepstep.runtime.late_threads import start_or_run
from keepstep_mesh.net.fork_safety import fork_error, never_free, tell_children
from keepstep_mesh.threads.starting import Thread

SLICE = timedelta(milliseconds=25)
"""Interval at which a wait checks its deadline and its communicator."""
LOOK = 40
"""Slices between two checks of the connections to the peers."""
STALL = 5
"""Checks before an operation with a lost peer fails. A peer that is done may disconnect while slower peers still pass
on its contribution; the lighthouse reports a peer that died before this limit.
"""
PEER_IS_GONE = "Connection closed by peer, which aborted the process group"
"""The words of Gloo for a loss that it notices itself: scripts look for them, and for "aborted" in ``errored()``."""


class Operation(Protocol):
    """An operation in flight, as its communicator knows it."""

    def is_completed(self) -> bool: ...

    def finish(self) -> None:
        """Wait until an operation has released its tensors that is completed, or whose communicator failed."""


class Communicator(ABC):
    """One configuration of a process group, from its rendezvous to its end."""

    backend: Backend | None = None
    has_forgotten = False
    """Whether the caller dropped an operation over Gloo that was not over, and may still write to its tensors."""
    can_lose_a_peer = False
    """Whether ``has_lost_a_peer`` can return True."""

    def __init__(self, rank: int, size: int, timeout: timedelta) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.error: Exception | None = None
        self._pid = os.getpid()
        self.patience_spent = 0
        """Slices spent in waits since the failure. All sleeping operations share one limit."""
        self._in_flight: weakref.WeakSet[Operation] = weakref.WeakSet()
        self._with_future: set[Operation] = set()
        """Operations with a future that is not complete. torch forgets an operation whose callback fails."""
        self._lock = threading.Lock()
        self._failed = threading.Event()
        self._peer_watch: Thread | None = None
        self._ended: list[socket.socket] = []
        """Connections that send no more, to be closed after their peers have closed."""
        tell_children(self)

    def forked(self) -> None:
        """Make the communicator unusable in a forked child, where torch's destructor would wait for missing threads."""
        never_free(self, self.backend)
        self._lock = threading.Lock()
        self.error = fork_error("the process group", self._pid)

    @property
    def is_forked(self) -> bool:
        """Whether this process is a forked child of the one that made the communicator."""
        return os.getpid() != self._pid

    @abstractmethod
    def connect(self) -> None:
        """Connect to the peers and set ``backend``. Ends soon after ``interrupt``."""

    @abstractmethod
    def interrupt(self) -> None:
        """End operations in flight and ``connect``. Does not block for long; may be called from any thread."""

    def has_lost_a_peer(self) -> bool:
        """Return whether a connection ended that an operation in flight may have missed."""
        return False

    def start(self, operation: str, args: tuple[Any, ...]) -> Work:
        """Call the method ``operation`` of torch's backend.

        No local variable holds the backend when this raises. A stored error keeps the local variables of its traceback
        alive, and the backend would keep its threads and sockets.
        """
        backend = self.backend
        try:
            if backend is None:
                raise ProcessGroupError(f"cannot run {operation}: the process group was shut down")
            return cast("Work", getattr(backend, operation)(*args))
        finally:
            del backend

    def started(self, work: Operation) -> None:
        """Note that ``work`` is in flight."""
        with self._lock:
            self._in_flight.add(work)

    def watch_future(self, work: Operation) -> None:
        """Check ``work`` and its peers, until ``completed``: no thread waits for its future."""
        with self._lock:
            if self.can_lose_a_peer and self._peer_watch is None and self.error is None:
                watch = Thread(target=self._watch_peers, name="keepstep-peer-watch", daemon=True)
                watch.start()
                self._peer_watch = watch
            self._with_future.add(work)

    def is_idle(self) -> bool:
        """Return whether the members are connected, and all operations are over."""
        with self._lock:
            return all(work.is_completed() for work in self._in_flight)

    def completed(self, work: Operation) -> None:
        """Note that the future of ``work`` is complete."""
        self._with_future.discard(work)

    def _watch_peers(self) -> None:
        """Fail the communicator if a peer disconnected and an operation has not noticed it for ``STALL`` checks.

        Complete the futures of operations whose callback torch dropped. Ends when no future is open.
        """
        looks: weakref.WeakKeyDictionary[Operation, int] = weakref.WeakKeyDictionary()
        try:
            while not self._failed.wait(LOOK * SLICE.total_seconds()):
                with self._lock:
                    watched = list(self._with_future)
                    if not watched:
                        self._peer_watch = None
                        return
                _finish([work for work in watched if work.is_completed()])
                waiting = [work for work in watched if not work.is_completed()]
                looks = weakref.WeakKeyDictionary({work: looks.get(work, 0) + 1 for work in waiting})
                if max(looks.values(), default=0) > STALL and self.has_lost_a_peer():
                    self.fail(ProcessGroupError(PEER_IS_GONE))
                del watched, waiting
        except Exception as error:  # noqa: BLE001  such as MemoryError: no thread watches the futures any more
            self.fail(error)

    @must_succeed("the abort of a process group")
    def fail(self, error: Exception) -> Exception:
        """Store the first error and close the connections. Return the first error."""
        with self._lock:
            if self.error is not None:
                return self.error
            self.error = error
            self._failed.set()
            with_future = list(self._with_future)
        self.interrupt()
        if with_future:
            start_or_run(Thread(target=_finish, args=(with_future,), name="keepstep-failed", daemon=True))
        return error

    def close(self) -> None:
        """Free all resources, after ``fail``. No operation writes to a tensor of the caller afterwards."""
        with self._lock:
            in_flight = list(self._in_flight)
        _finish(in_flight)
        peer_watch = self._peer_watch
        if peer_watch is not None and peer_watch is not threading.current_thread():
            peer_watch.join_or_end_process()
        backend, self.backend = [self.backend], None
        if backend[0] is not None:
            dispose(backend, self._ended)


def _finish(works: list[Operation]) -> None:
    for work in works:
        work.finish()
