"""One configuration of a process group on one of torch's backends, and the operations in flight on it.

The first failure ends a communicator: it closes its connections, so that operations in flight end within a millisecond
and every peer notices at once. ``wait`` returns or raises only after the operation has released its tensors, so that a
late result never overwrites a gradient.

Gloo does not wake an operation whose peer disconnects in the middle of a message; it wakes only operations whose
message has not begun. Such an operation sleeps until its own timeout and writes to no tensor. Therefore a wait checks
whether all peers are still connected; for operations with a future a thread checks. A wait abandons an operation that
sleeps on a failed communicator after ``PATIENCE``, which is much longer than an operation that still runs can take.
"""

from __future__ import annotations

import atexit
import concurrent.futures
import itertools
import os
import re
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, cast

import torch
from torch.distributed.distributed_c10d import Backend, Work
from torch.futures import Future

from keepstep.process_group.base import ProcessGroupAbortedError, ProcessGroupError
from keepstep.runtime.failed_future import fail_future
from keepstep_mesh.net.fork_safety import fork_error, never_free, tell_children

NO_TIMEOUT = timedelta(0)
"""Tells torch to use the timeout of the operation."""
SLICE = timedelta(milliseconds=25)
"""Interval at which a wait checks its deadline and its communicator."""
INSTANT = timedelta(milliseconds=1)
"""The shortest slice; for torch 0 means no limit."""
PATIENCE = 6
"""Limit of a wait on a failed communicator, in slices; plus one for each ``PATIENCE_BYTES`` of its tensors."""
PATIENCE_BYTES = 10_000_000
PEER_IS_GONE = "a peer closed its connection"
LOOK = 40
"""Slices between two checks of the connections to the peers."""
STALL = 5
"""Checks before an operation with a lost peer fails. A peer that is done may disconnect while slower peers still pass
on its contribution; the lighthouse reports a peer that died before this limit.
"""
EXIT_SECONDS = 2.0
"""Limit of the wait, at the end of the process, for communicators that are being freed."""

_SLICE_IS_OVER = "Operation timed out!"
_GLOO_PLACE = re.compile(r"\[/[^\]]*\] ")
_GLOO_ADVICE = re.compile(r"\. This is typically caused by .*", re.DOTALL)


class Communicator(ABC):
    """One configuration of a process group, from its rendezvous to its end."""

    backend: Backend | None = None
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
        self._in_flight: weakref.WeakSet[BackendWork] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._failed = threading.Event()
        self._peer_watch: threading.Thread | None = None
        tell_children(self)

    def forked(self) -> None:
        """Make the communicator unusable in a forked child, where torch's destructor would wait for missing threads."""
        never_free(self, self.backend)
        self._lock = threading.Lock()
        self.error = fork_error("the process group", self._pid)

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

    def started(self, work: BackendWork) -> None:
        """Note that ``work`` is in flight."""
        with self._lock:
            self._in_flight.add(work)

    def watch_futures(self) -> None:
        """Start the thread that checks the peers of operations with a future."""
        if self.can_lose_a_peer and self._peer_watch is None:
            with self._lock:
                if self._peer_watch is None and self.error is None:
                    self._peer_watch = threading.Thread(
                        target=self._watch_peers, name="keepstep-peer-watch", daemon=True
                    )
                    self._peer_watch.start()

    def _watch_peers(self) -> None:
        """Fail the communicator if a peer disconnected and an operation has not noticed it for ``STALL`` checks.

        Ends when no operation with a future is in flight.
        """
        looks: weakref.WeakKeyDictionary[BackendWork, int] = weakref.WeakKeyDictionary()
        while not self._failed.wait(LOOK * SLICE.total_seconds()):
            with self._lock:
                watched = [work for work in self._in_flight if work.has_future and not work.is_completed()]
                if not watched:
                    self._peer_watch = None
                    return
            looks = weakref.WeakKeyDictionary({work: looks.get(work, 0) + 1 for work in watched})
            if max(looks.values()) > STALL and self.has_lost_a_peer():
                self.fail(ProcessGroupError(PEER_IS_GONE))
            del watched

    def fail(self, error: Exception) -> Exception:
        """Store the first error and close the connections. Return the first error."""
        with self._lock:
            if self.error is not None:
                return self.error
            self.error = error
            self._failed.set()
            with_future = [work for work in self._in_flight if work.has_future]
        self.interrupt()
        if with_future:
            threading.Thread(target=_finish, args=(with_future,), name="keepstep-failed", daemon=True).start()
        return error

    def close(self) -> None:
        """Free all resources, after ``fail``. No operation writes to a tensor of the caller afterwards."""
        with self._lock:
            in_flight = list(self._in_flight)
        _finish(in_flight)
        peer_watch = self._peer_watch
        if peer_watch is not None:
            peer_watch.join()
        backend, self.backend = [self.backend], None
        if backend[0] is not None:
            _dispose(backend)


_disposals: set[threading.Thread] = set()


def _dispose(backend: list[Backend | None]) -> None:
    """Free a backend in a thread: torch's destructor waits 20 ms for its own thread, and for sleeping operations."""

    def dispose() -> None:
        backend.clear()
        _disposals.discard(threading.current_thread())

    thread = threading.Thread(target=dispose, name="keepstep-disposal", daemon=True)
    _disposals.add(thread)
    thread.start()


@atexit.register
def _await_disposals() -> None:
    """Wait for these threads: C++ aborts the process if a thread returns into an interpreter that has ended."""
    deadline = time.monotonic() + EXIT_SECONDS
    for thread in tuple(_disposals):
        thread.join(max(0.0, deadline - time.monotonic()))


class _AsleepError(TimeoutError):
    """The operation sleeps until its own timeout."""


class BackendWork(Work):
    """An operation in flight. ``tensors``: the tensors that it writes or sends."""

    def __init__(self, communicator: Communicator, raw: Work, operation: str, tensors: Any) -> None:
        super().__init__()
        self._communicator = communicator
        self._raw: Work | None = raw
        self._operation = operation
        self._tensors = tensors
        self._error: Exception | None = None
        self._future: Future[Any] | None = None
        self._settling = threading.Lock()
        communicator.started(self)

    @property
    def has_future(self) -> bool:
        """Whether ``get_future`` was called."""
        return self._future is not None

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait until the operation is over.

        Args:
            timeout: limit of the wait; 0: the timeout of the operation.

        Returns:
            True.

        Raises:
            TimeoutError: the operation took too long. The group must be configured again.
            ProcessGroupError: the operation failed or was aborted. The group must be configured again.
        """
        raw = self._raw
        if raw is not None:
            failed = asleep = False
            try:
                self._await(raw, timeout)
            except (RuntimeError, TimeoutError) as error:
                self._error, failed = self._failure(error, timeout), True
                asleep = isinstance(error, _AsleepError)
            if asleep or not failed:
                self._raw = None  # torch's work holds the communicator's threads and sockets
            del raw  # a traceback would hold it
            if failed and self._error is not None:
                # not in the `except` block: its error would be the context of errors that callbacks raise
                self._communicator.fail(self._error)
                self.finish()
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> Future[Any]:
        """Return a future that completes with the tensors, or the error, when the operation is over."""
        if self._future is None:
            raw = self._raw
            self._communicator.watch_futures()
            self._future = Future(devices=list({one.device for one in _flat(self._tensors) if not one.is_cpu}))
            if raw is not None:
                self._watch(raw)
            if raw is None or self._communicator.error is not None:  # `fail` may have missed this future
                self.finish()
        return self._future

    def is_completed(self) -> bool:
        return self._raw is None or self._raw.is_completed()

    def is_success(self) -> bool:
        return self._error is None if self._raw is None else self._raw.is_success()

    def exception(self) -> Any:
        return self._error if self._raw is None else self._raw.exception()

    def result(self) -> list[torch.Tensor]:
        return list(self._tensors) if self._raw is None else self._raw.result()

    def synchronize(self) -> None:
        if self._raw is not None:
            self._raw.synchronize()

    def finish(self) -> None:
        """Wait on a failed communicator until the operation has released its tensors."""
        raw = self._raw
        if raw is not None:
            try:
                self._await(raw, NO_TIMEOUT)
            except (RuntimeError, TimeoutError) as error:
                self._error = self._error or self._failure(error, NO_TIMEOUT)
            self._raw = None
        del raw  # callbacks of the future run now; their errors would hold this frame
        self._settle()

    def _watch(self, raw: Work) -> None:
        raw.get_future().add_done_callback(lambda future: self._arrived(future.value))

    def _arrived(self, outcome: Callable[[], Any]) -> None:
        try:
            outcome()
        except RuntimeError as error:
            self._error = self._failure(error, NO_TIMEOUT)
            self._communicator.fail(self._error)
        self._raw = None
        self._settle()

    def _settle(self) -> None:
        if self._future is None or not self._settling.acquire(blocking=False):
            return
        if self._error is None:
            self._future.set_result(self._tensors)
        else:
            fail_future(self._future, self._error)

    def _await(self, raw: Work, timeout: timedelta) -> None:
        """Wait in slices, so that a wait can abandon an operation that never wakes.

        Raises:
            RuntimeError: the error of torch.
            TimeoutError: ``timeout`` or the limit of waits on a failed communicator has passed.
        """
        deadline = time.monotonic() + timeout.total_seconds() if timeout > NO_TIMEOUT else float("inf")
        communicator = self._communicator
        patience = PATIENCE + sum(tensor.nbytes for tensor in _flat(self._tensors)) // PATIENCE_BYTES
        spent = communicator.patience_spent
        for waited in itertools.count(1):
            if self._poll(raw, SLICE if spent < patience else INSTANT):
                return
            if time.monotonic() >= deadline:
                raise TimeoutError
            if communicator.error is not None:
                spent += 1
                communicator.patience_spent = max(spent, communicator.patience_spent)
                if spent > patience:
                    raise _AsleepError
            elif waited > STALL * LOOK and waited % LOOK == 0 and communicator.has_lost_a_peer():
                communicator.fail(ProcessGroupError(PEER_IS_GONE))

    def _poll(self, raw: Work, limit: timedelta) -> bool:
        """Wait for at most ``limit``; return whether the operation is over."""
        try:
            raw.wait(limit)
        except RuntimeError as error:
            if _SLICE_IS_OVER in str(error):
                return False
            raise
        return True

    def _failure(self, error: Exception, timeout: timedelta) -> Exception:
        """Return the error to raise: the first error of the communicator, or else ``error``."""
        first = self._communicator.error
        if first is not None:
            kind = ProcessGroupAbortedError if isinstance(first, ProcessGroupAbortedError) else ProcessGroupError
            return kind(f"{self._operation} failed: {first}")
        if isinstance(error, TimeoutError) or "imed out" in str(error):
            limit = timeout if timeout > NO_TIMEOUT else self._communicator.timeout
            return TimeoutError(f"{self._operation} took longer than {limit}: a peer is stuck, slow or disconnected")
        return ProcessGroupError(f"{self._operation} failed: {plain_message(error)}")


class ThreadedWork(BackendWork):
    """A send, receive or reduce-scatter over Gloo, for which torch has neither a future nor a wait with a limit."""

    _waiting: concurrent.futures.Future[None] | None = None

    def _watch(self, raw: Work) -> None:
        self._wait_in_thread(raw).add_done_callback(lambda waiting: self._arrived(waiting.result))

    def _poll(self, raw: Work, limit: timedelta) -> bool:
        try:
            self._wait_in_thread(raw).result(limit.total_seconds())
        except concurrent.futures.TimeoutError:
            return False
        return True

    def _wait_in_thread(self, raw: Work) -> concurrent.futures.Future[None]:
        waiting = self._waiting
        if waiting is None:
            waiting = self._waiting = concurrent.futures.Future()
            threading.Thread(target=_wait_into, args=(raw, waiting), name="keepstep-wait", daemon=True).start()
        return waiting


def _wait_into(raw: Work, outcome: concurrent.futures.Future[None]) -> None:
    try:
        raw.wait()
    except RuntimeError as error:
        outcome.set_exception(error.with_traceback(None))
    else:
        outcome.set_result(None)


def _finish(works: list[BackendWork]) -> None:
    for work in works:
        work.finish()


def plain_message(error: Exception) -> str:
    """Return Gloo's message without its source locations and advice."""
    return _GLOO_ADVICE.sub("", _GLOO_PLACE.sub("", str(error)))


def _flat(tensors: Any) -> Iterator[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        yield tensors
    elif isinstance(tensors, list | tuple):
        for one in tensors:
            yield from _flat(one)
