"""Deadlines for torch futures, code blocks and CUDA streams.

One thread watches all deadlines, and ends after the last one. If a callback blocks that thread, the watchdog ends the
process: a trainer that cannot keep its deadlines would block its whole job.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
import time
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch.futures import Future

from keepstep.runtime import environment
from keepstep.runtime.exits import end_process
from keepstep.runtime.failed_future import complete_future, fail_future
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.exit_codes import EXIT_WATCHDOG
from keepstep_mesh.net.fork_safety import tell_children
from keepstep_mesh.threads.starting import Thread
from keepstep_mesh.threads.watchdog import watched

T = TypeVar("T")

log = get_logger("keepstep.futures")

WATCHDOG_TIMEOUT = environment.seconds("WATCHDOG_TIMEOUT_SEC", timedelta(seconds=30))


class _Deadline:
    __slots__ = ("callback", "due")

    def __init__(self, due: float, callback: Callable[[], None]) -> None:
        self.due = due
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class _Deadlines:
    """A heap of deadlines, and the thread that watches them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._heap: list[tuple[float, int, _Deadline]] = []
        self._order = itertools.count()
        self._thread: Thread | None = None
        tell_children(self)

    def forked(self) -> None:
        """Start again in a forked child, which does not have the thread, nor perhaps the holder of the lock."""
        self._changed, self._heap, self._thread = threading.Condition(), [], None

    def after(self, timeout: timedelta, callback: Callable[[], None]) -> _Deadline:
        deadline = _Deadline(time.monotonic() + timeout.total_seconds(), callback)
        with self._changed:
            heapq.heappush(self._heap, (deadline.due, next(self._order), deadline))
            if self._thread is None:
                thread = Thread(target=self._run, name="keepstep-deadlines", daemon=True)
                thread.start()
                self._thread = thread
            self._changed.notify()
        return deadline

    def cancel(self, deadline: _Deadline) -> None:
        with self._changed:
            deadline.cancel()
            while self._heap and self._heap[0][2].callback is None:
                heapq.heappop(self._heap)
            self._changed.notify()

    def _run(self) -> None:
        try:
            self._keep()
        except BaseException:  # noqa: BLE001  such as MemoryError
            end_process("the thread that watches deadlines failed", EXIT_WATCHDOG, stacks=True)

    def _keep(self) -> None:
        while True:
            with self._changed:
                if not self._heap:
                    self._thread = None
                    return
                due, _, deadline = self._heap[0]
                wait = due - time.monotonic()
                if wait > 0:
                    self._changed.wait(wait)
                    continue
                heapq.heappop(self._heap)
                callback = deadline.callback
            if callback is not None:
                try:
                    with watched("a deadline's callback", WATCHDOG_TIMEOUT.total_seconds()):
                        callback()
                except MemoryError:
                    raise  # others would wait for what it did not do
                except Exception:  # the thread must watch the other deadlines
                    log.exception("a deadline's callback failed")


_DEADLINES = _Deadlines()


def future_timeout(fut: Future[T], timeout: timedelta) -> Future[T]:
    """Limit the time of a future.

    Args:
        fut: any future of torch.
        timeout: from now.

    Returns:
        A future that completes as ``fut`` does, or with TimeoutError after ``timeout``, whichever comes first.
    """
    timed: Future[T] = Future()
    lock = threading.Lock()
    settled = False

    def settle(finish: Callable[[], None]) -> None:
        nonlocal settled
        with lock:
            if settled:
                return
            settled = True
        finish()

    deadline = _DEADLINES.after(
        timeout,
        lambda: settle(
            lambda: fail_future(
                timed, TimeoutError(f"the future did not complete within {timeout.total_seconds():g} s")
            )
        ),
    )

    def finished(source: Future[T]) -> None:
        def finish() -> None:
            try:
                value = source.value()
            except Exception as error:  # noqa: BLE001  any error of the future is passed on
                fail_future(timed, error)
            else:
                complete_future(timed, value)
            _DEADLINES.cancel(deadline)

        settle(finish)

    fut.add_done_callback(finished)
    return timed


def future_wait(fut: Future[T], timeout: timedelta) -> T:
    """Wait for a future.

    Args:
        fut: any future of torch.
        timeout: from now.

    Returns:
        The value of ``fut``.

    Raises:
        TimeoutError: ``fut`` did not complete within ``timeout``.
        Exception: the error of ``fut``.
    """
    done = threading.Event()
    fut.add_done_callback(lambda _: done.set())
    if not done.wait(timeout.total_seconds()) and not fut.done():  # done: its callback got no memory
        raise TimeoutError(f"the future did not complete within {timeout.total_seconds():g} s")
    return fut.wait()


@contextlib.contextmanager
def context_timeout(callback: Callable[[], None], timeout: timedelta) -> Generator[None, None, None]:
    """Limit the time of a ``with`` block.

    Args:
        callback: called in another thread if the block takes longer than ``timeout``. The block itself goes on.
        timeout: from the start of the block.
    """
    deadline = _DEADLINES.after(timeout, callback)
    try:
        yield
    finally:
        _DEADLINES.cancel(deadline)


def stream_timeout(callback: Callable[[], None], timeout: timedelta) -> None:
    """Limit the time of the work that is queued on the current CUDA stream now.

    Args:
        callback: called in another thread if the work is not done within ``timeout``.
        timeout: from now.
    """
    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()

    def check() -> None:
        if not event.query():
            callback()

    _DEADLINES.after(timeout, check)
