"""A daemon thread that runs an asyncio loop: lighthouse session, group server, transfers.

The training thread stays synchronous. It starts coroutines on the loop, and waits for them with a deadline.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from keepstep_mesh.net.event_loop import new_event_loop
from keepstep_mesh.net.fork_safety import fork_error
from keepstep_mesh.threads.starting import Thread

T = TypeVar("T")

CALL_MARGIN_SECONDS = 15.0
"""Seconds that a caller waits beyond a deadline that the event loop thread keeps."""


class LoopThread:
    """An event loop in a thread of its own.

    Args:
        name: of the thread, as it appears in stacks.
    """

    def __init__(self, name: str = "keepstep-mesh") -> None:
        self.loop = new_event_loop()
        self._waited_for: set[asyncio.Future[Any]] = set()
        """Futures of ``wait_for`` that are not done."""
        self._pid = os.getpid()
        self._thread = Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            left = asyncio.all_tasks(self.loop)
            for future in (*left, *self._waited_for):
                future.cancel()
            if left:
                self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()

    def spawn(self, coroutine: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Start ``coroutine`` on the loop. Any thread."""
        try:
            self._check_alive()
        except BaseException:
            coroutine.close()
            raise
        future: concurrent.futures.Future[T] = concurrent.futures.Future()
        self.loop.call_soon_threadsafe(self._start, coroutine, future)
        return future

    def _start(self, coroutine: Coroutine[Any, Any, T], future: concurrent.futures.Future[T]) -> None:
        """Start the task of ``spawn``, in half of the instructions of ``asyncio.run_coroutine_threadsafe``."""
        task = self.loop.create_task(coroutine)
        task.add_done_callback(partial(_hand_over, future))
        future.add_done_callback(partial(self._cancel, task))

    def _cancel(self, task: asyncio.Task[T], future: concurrent.futures.Future[T]) -> None:
        if future.cancelled() and not task.done():
            with contextlib.suppress(RuntimeError):  # the loop has been closed
                self.loop.call_soon_threadsafe(task.cancel)

    def call(self, coroutine: Coroutine[Any, Any, T], timeout: float) -> T:
        """Run ``coroutine`` on the loop and wait up to ``timeout`` seconds; then cancel it: TimeoutError."""
        if threading.current_thread() is self._thread:
            coroutine.close()
            raise RuntimeError("the event loop thread cannot wait for itself")
        future = self.spawn(coroutine)
        try:
            return future.result(timeout)
        except BaseException as error:
            if future.cancel() and isinstance(error, TimeoutError):
                raise TimeoutError(f"the event loop thread was not done within {timeout:g} s") from None
            raise

    def wait_for(self, start: Callable[[], asyncio.Future[T]], timeout: float) -> T:
        """Call ``start`` on the loop and wait for the future that it returns.

        Unlike ``call``, this creates no task, and the loop thread wakes the caller directly.

        Args:
            start: called on the loop; what it raises is raised here.
            timeout: seconds; then the future is cancelled.

        Raises:
            TimeoutError: the future was not done within ``timeout``.
            RuntimeError: the event loop thread has ended.
        """
        self._check_alive()
        started: list[asyncio.Future[T]] = []
        failed: Exception | None = None
        done = threading.Lock()
        done.acquire()

        def ended(future: asyncio.Future[T]) -> None:
            self._waited_for.discard(future)
            done.release()

        def run() -> None:
            nonlocal failed
            try:
                future = start()
                started.append(future)
                self._waited_for.add(future)
                future.add_done_callback(ended)
            except Exception as error:  # noqa: BLE001  raised in the caller
                failed = error
                done.release()

        self.loop.call_soon_threadsafe(run)
        finished = False
        try:
            finished = done.acquire(timeout=timeout)
        finally:
            if not finished:
                with contextlib.suppress(RuntimeError):  # the loop has been closed
                    self.loop.call_soon_threadsafe(lambda: started[0].cancel())  # noqa: PLW0108  empty until the loop has run ``run``
        if not finished:
            raise TimeoutError(f"the event loop thread was not done within {timeout:g} s")
        if failed is not None:
            raise failed
        if started[0].cancelled():
            raise self._has_ended()
        return started[0].result()

    def _check_alive(self) -> None:
        if self.loop.is_closed() or not self._thread.is_alive():
            if os.getpid() != self._pid:
                raise fork_error(f"the thread {self._thread.name!r}", self._pid)
            raise self._has_ended()

    def _has_ended(self) -> RuntimeError:
        return RuntimeError(f"the event loop thread {self._thread.name!r} has ended: its owner was shut down")

    @property
    def is_alive(self) -> bool:
        """Whether the loop runs, in this process."""
        return not self.loop.is_closed() and self._thread.is_alive() and os.getpid() == self._pid

    def stop(self, timeout: float = 5.0) -> None:
        """Cancel all tasks and waits, end the loop and join the thread. May be called more than once."""
        if self._thread.is_alive():
            try:
                self.loop.call_soon_threadsafe(self.loop.stop)
            except RuntimeError:  # closed between the two lines
                return
            self._thread.join(timeout)


def _hand_over(future: concurrent.futures.Future[T], task: asyncio.Task[T]) -> None:
    """Complete ``future`` as ``task`` has ended, unless it was cancelled."""
    error = None if task.cancelled() else task.exception()
    if task.cancelled():
        future.cancel()
    if not future.set_running_or_notify_cancel():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(task.result())


class SharedLoopThread:
    """One event loop thread for all clients of a kind in this process, from the first client to the last.

    Threads with loops of their own would wait for the interpreter lock: with 64 clients that takes three times as much
    processor time as the requests.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._current: LoopThread | None = None
        self._users = 0
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """The thread, and the holder of the lock, do not exist in a forked child."""
        self._lock, self._current, self._users = threading.Lock(), None, 0

    def take(self) -> LoopThread:
        """Return the thread, which runs until each ``take`` has its ``give_back``."""
        with self._lock:
            if self._current is None or not self._current.is_alive:
                self._current, self._users = LoopThread(self._name), 0
            self._users += 1
            return self._current

    def give_back(self, taken: LoopThread) -> None:
        """Stop the thread if no other client uses it. In a forked child, the thread of the parent is not touched."""
        with self._lock:
            if taken is not self._current:
                return
            self._users -= 1
            if self._users:
                return
            self._current = None
        taken.stop()
