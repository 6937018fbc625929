"""Threads whose start cannot hang.

The start of a thread of Python waits, without a limit, until the thread runs. A thread that gets no memory for its
first call ends before that. Then nothing can end the wait, and the waiting thread may hold locks that an abort needs,
so the process ends: its state cannot be trusted.
"""

from __future__ import annotations

import concurrent.futures
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


class Thread(threading.Thread):  # noqa: TID251
    """A thread. The process ends with ``EXIT_WATCHDOG`` if it does not start in time."""

    def start(self) -> None:
        with watched(f"the start of thread {self.name!r} (is memory missing?)", THREAD_START_SECONDS):
            super().start()

    def join_or_end_process(self) -> None:
        """Wait for the end of the thread. The process ends with ``EXIT_WATCHDOG`` if it does not end in time."""
        with watched(f"the end of thread {self.name!r}", THREAD_END_SECONDS):
            self.join()


class ThreadPoolExecutor(concurrent.futures.ThreadPoolExecutor):  # noqa: TID251
    """A pool of threads. The process ends with ``EXIT_WATCHDOG`` if one of them does not start in time."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> concurrent.futures.Future[T]:
        with watched("the start of a thread of a pool (is memory missing?)", THREAD_START_SECONDS):
            return super().submit(fn, *args, **kwargs)
