"""An event loop in virtual time, whose clocks the driver sets: real files and threads, without waits in real time.

When no callback is ready and no thread works, the time of the next timer is now.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

THREAD_SECONDS = 60.0
"""Longest real time to wait for a thread."""


class Clock:
    """``monotonic`` seconds since the begin, and Unix time, which ``set_by`` moves alone."""

    def __init__(self, unix: float = 1_800_000_000.0) -> None:
        self.monotonic = 0.0
        self._unix = unix

    @property
    def unix(self) -> float:
        return self._unix + self.monotonic

    def set_by(self, seconds: float) -> None:
        """Set the clock of the wall, as an administrator or NTP does."""
        self._unix += seconds

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let ``time.time`` and ``time.monotonic`` be those of this clock."""
        before = time.time, time.monotonic
        time.time, time.monotonic = lambda: self.unix, lambda: self.monotonic
        try:
            yield
        finally:
            time.time, time.monotonic = before


class _Selector(selectors.DefaultSelector):
    clock: Clock
    threads = 0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        if self.threads or timeout is None:
            return super().select(THREAD_SECONDS)
        self.clock.monotonic += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self, clock: Clock) -> None:
        self._virtual = _Selector()
        self._virtual.clock = clock
        super().__init__(self._virtual)

    def time(self) -> float:
        return self._virtual.clock.monotonic

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        self._virtual.threads += 1
        future = super().run_in_executor(executor, func, *args)
        future.add_done_callback(self._thread_ended)
        return future

    def _thread_ended(self, _: asyncio.Future[Any]) -> None:
        self._virtual.threads -= 1


def run(clock: Clock, work: Coroutine[Any, Any, None]) -> None:
    with clock.installed(), asyncio.Runner(loop_factory=lambda: VirtualLoop(clock)) as runner:
        runner.run(work)
