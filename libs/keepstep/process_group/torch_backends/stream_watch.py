"""Detect operations that do not pass their stream in time."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

from keepstep.process_group.group_errors import timed_out
from keepstep_mesh.threads.starting import Thread

BACKLOG_POLL_SECONDS = 0.1
"""Interval at which an operation that cannot begin yet is checked: no event of a device wakes a thread."""
WATCH_END_SECONDS = 10.0
"""Limit of the wait for its thread, which may be aborting the communicator."""


class Mark(Protocol):
    """An event of a device."""

    def query(self) -> bool:
        """Return whether the device has passed it."""


@dataclass(slots=True)
class _Expected:
    timeout: timedelta
    begun: Mark
    ended: Mark
    due: float | None = None
    """Monotonic time at which it is late; None: it has not begun."""


class StreamWatch:
    """Fails a communicator when its stream does not pass a mark in time. Its thread runs while marks are pending.

    The time of an operation begins when the work before it is done. A long backlog of the device is no failure.

    Args:
        fail: called once, with the error.
        begin: called first in its thread.
    """

    def __init__(self, fail: Callable[[Exception], object], begin: Callable[[], object]) -> None:
        self._fail = fail
        self._begin = begin
        self._changed = threading.Condition()
        self._expected: collections.deque[_Expected] = collections.deque()
        self._stopped = False
        self._thread: Thread | None = None

    def add(self, timeout: timedelta, begun: Mark, ended: Mark) -> None:
        """Expect ``ended`` within ``timeout`` of ``begun``."""
        with self._changed:
            self._drop_passed()
            self._expected.append(_Expected(timeout, begun, ended))
            if self._thread is None and not self._stopped:
                thread = Thread(target=self._run, name="keepstep-stream-watch", daemon=True)
                thread.start()
                self._thread = thread

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def join(self) -> None:
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(WATCH_END_SECONDS)

    def _run(self) -> None:
        try:
            self._begin()
            late = self._await_late()
        except Exception as error:  # noqa: BLE001  of the device, or MemoryError: no thread watches the stream any more
            self._fail(error)
            return
        if late is not None:
            self._fail(timed_out("a collective", late))

    def _await_late(self) -> timedelta | None:
        """Wait until an operation is late, and return its timeout; None: all have passed, or the watch was stopped."""
        late = None
        with self._changed:
            while not self._stopped and late is None:
                self._drop_passed()
                if not self._expected:
                    self._thread = None
                    return None
                first, now = self._expected[0], time.monotonic()
                if first.due is None and first.begun.query():
                    first.due = now + first.timeout.total_seconds()
                if first.due is None:
                    self._changed.wait(BACKLOG_POLL_SECONDS)
                elif first.due <= now:
                    late = first.timeout
                else:
                    self._changed.wait(first.due - now)
            self._expected.clear()
        return late

    def _drop_passed(self) -> None:
        while self._expected and self._expected[0].ended.query():
            self._expected.popleft()
