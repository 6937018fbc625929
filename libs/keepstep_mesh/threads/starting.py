"""Threads whose start cannot hang.

The start of a thread of Python waits, without a limit, until the thread runs. A thread that gets no memory for its
first call ends before that. Then nothing can end the wait, and the waiting thread may hold locks that an abort needs,
so the process ends: its state cannot be trusted.

Python 3.12 starts no thread from the moment when the main thread ends, so also none in an ``atexit`` callback
(3.11 and 3.13 do). There a start at that time uses a thread that ``reserve_for_exit`` has started.
"""

from __future__ import annotations

import concurrent.futures
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from keepstep_mesh.threads.watchdog import watched

P = ParamSpec("P")
T = TypeVar("T")

THREAD_START_SECONDS = 10.0
"""Limit for the start of a thread."""
THREAD_END_SECONDS = 30.0
"""Limit for the end of a thread that has nothing to wait for."""
RESERVED = 8 if sys.version_info[:2] == (3, 12) else 0
"""Threads for the end of the process. The end of a Manager starts three, and one for each further relay."""


class _Reserve:
    """Threads that wait for something to run. A forked child has none of them."""

    def __init__(self) -> None:
        self.empty()

    def empty(self) -> None:
        self._works: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._free = self._started = 0
        self._lock = threading.Lock()

    def fill(self) -> None:
        with self._lock:
            while self._started < RESERVED:
                threading.Thread(target=self._run_next, name="keepstep-reserve", daemon=True).start()  # noqa: TID251
                self._started += 1
                self._free += 1

    def run(self, work: Callable[[], None]) -> bool:
        """Run ``work`` in a thread that waits; return False if none waits."""
        with self._lock:
            if not self._free:
                return False
            self._free -= 1
        self._works.put(work)
        return True

    def _run_next(self) -> None:
        self._works.get()()


_reserve = _Reserve()
os.register_at_fork(after_in_child=_reserve.empty)


def reserve_for_exit() -> None:
    """Start the threads that the end of this process may need, where Python starts none then. Again: no effect."""
    _reserve.fill()


class Thread(threading.Thread):  # noqa: TID251
    """A thread. The process ends with ``EXIT_WATCHDOG`` if it does not start in time."""

    _reserved: threading.Event | None = None
    """Set at the end of ``run`` in a thread of the reserve."""

    def start(self) -> None:
        with watched(f"the start of thread {self.name!r} (is memory missing?)", THREAD_START_SECONDS):
            try:
                super().start()
            except RuntimeError as error:
                if "interpreter shutdown" not in str(error):
                    raise
                self._reserved = threading.Event()
                if not _reserve.run(self._run_reserved):
                    raise

    def _run_reserved(self) -> None:
        try:
            self.run()
        finally:
            if self._reserved is not None:
                self._reserved.set()

    def join(self, timeout: float | None = None) -> None:
        if self._reserved is None:
            super().join(timeout)
        else:
            self._reserved.wait(timeout)

    def is_alive(self) -> bool:
        return super().is_alive() if self._reserved is None else not self._reserved.is_set()

    def join_or_end_process(self) -> None:
        """Wait for the end of the thread. The process ends with ``EXIT_WATCHDOG`` if it does not end in time."""
        with watched(f"the end of thread {self.name!r}", THREAD_END_SECONDS):
            self.join()


class ThreadPoolExecutor(concurrent.futures.ThreadPoolExecutor):  # noqa: TID251
    """A pool of threads. The process ends with ``EXIT_WATCHDOG`` if one of them does not start in time."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> concurrent.futures.Future[T]:
        with watched("the start of a thread of a pool (is memory missing?)", THREAD_START_SECONDS):
            return super().submit(fn, *args, **kwargs)
