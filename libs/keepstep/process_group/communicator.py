"""One configuration of a process group on one of torch's backends, and the operations in flight on it.

The first failure of an operation ends the communicator: its connections are closed, so that all operations in flight
end within a millisecond, and every peer notices at once. ``wait`` returns or raises after the operation has released
its tensors, so that a late result is never written to a gradient.

Gloo does not wake an operation whose peer disconnected in the middle of a message; it wakes only operations that wait
for the start of one. Such an operation sleeps until its own timeout, and writes nothing. So a wait checks from time to
time that all peers are still connected; for futures a thread does. On a failed communicator a sleeping operation is
given up after ``PATIENCE``, which is much longer than any running operation takes to end.
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
"""Means the operation's own timeout, in torch's calls."""
SLICE = timedelta(milliseconds=25)
"""A wait checks this often whether its timeout has passed or its communicator has failed."""
INSTANT = timedelta(milliseconds=1)
"""The shortest slice, because torch waits without limit for 0."""
PATIENCE = 6
"""Slices that a wait takes on a failed communicator, plus one for each ``PATIENCE_BYTES`` of its tensors."""
PATIENCE_BYTES = 10_000_000
PEER_IS_GONE = "a peer closed its connection"
LOOK = 40
"""Slices between two checks that all peers are still connected."""
STALL = 5
"""Checks that may fail before an operation is given up. A peer that has finished may disconnect while others still pass
on its data. The death of a peer is reported by the lighthouse sooner.
"""
EXIT_SECONDS = 2.0
"""Limit at the end of the process for communicators that are being freed."""

_SLICE_IS_OVER = "Operation timed out!"
_GLOO_PLACE = re.compile(r"\[/[^\]]*\] ")
_GLOO_ADVICE = re.compile(r"\. This is typically caused by .*", re.DOTALL)


class Communicator(ABC):
    """One configuration of a process group, from its rendezvous to its end."""

    backend: Backend | None = None
    can_lose_a_peer = False
    """Whether ``has_lost_a_peer`` can be true."""

    def __init__(self, rank: int, size: int, timeout: timedelta) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.error: Exception | None = None
        self._pid = os.getpid()
        self.patience_spent = 0
        """Slices that any wait took since the failure, so that several sleeping operations are waited for only once."""
        self._in_flight: weakref.WeakSet[BackendWork] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._failed = threading.Event()
        self._looking: threading.Thread | None = None
        tell_children(self)

    def forked(self) -> None:
        """Disable this object in a forked child: torch's destructor would wait for threads that only the parent has."""
        never_free(self, self.backend)
        self._lock = threading.Lock()
        self.error = fork_error("the process group", self._pid)

    @abstractmethod
    def connect(self) -> None:
        """Connect to the peers and set ``backend``. Ends soon after ``interrupt``."""

    @abstractmethod
    def interrupt(self) -> None:
        """End all operations in flight, and ``connect``. From any thread; never blocks for long."""

    def has_lost_a_peer(self) -> bool:
        """Return whether a connection ended that an operation in flight may not have noticed."""
        return False

    def start(self, operation: str, args: tuple[Any, ...]) -> Work:
        """Call the method ``operation`` of torch's backend.

        The backend is in no local variable when this raises. An error that is kept keeps the local variables of its
        traceback, and with the backend its threads and sockets.
        """
        backend = self.backend
        try:
            if backend is None:
                raise ProcessGroupError(f"{operation} on a process group that was shut down")
            return cast("Work", getattr(backend, operation)(*args))
        finally:
            del backend

    def started(self, work: BackendWork) -> None:
        """Note that ``work`` is in flight."""
        with self._lock:
            self._in_flight.add(work)

    def look_after_futures(self) -> None:
        """Check the connections from now on in a thread: an operation has a future, which no thread may wait for."""
        if self.can_lose_a_peer and self._looking is None:
            with self._lock:
                if self._looking is None and self.error is None:
                    self._looking = threading.Thread(target=self._look, name="keepstep-look", daemon=True)
                    self._looking.start()

    def _look(self) -> None:
        """Fail the communicator if a peer has disconnected and an operation did not notice for ``STALL`` checks.

        Ends when no operation with a future is in flight.
        """
        looks: weakref.WeakKeyDictionary[BackendWork, int] = weakref.WeakKeyDictionary()
        while not self._failed.wait(LOOK * SLICE.total_seconds()):
            with self._lock:
                promised = [work for work in self._in_flight if work.promised and not work.is_completed()]
                if not promised:
                    self._looking = None
                    return
            looks = weakref.WeakKeyDictionary({work: looks.get(work, 0) + 1 for work in promised})
            if max(looks.values()) > STALL and self.has_lost_a_peer():
                self.fail(ProcessGroupError(PEER_IS_GONE))
            del promised

    def fail(self, error: Exception) -> Exception:
        """Keep ``error``, if it is the first, and close the connections. Return the first error."""
        with self._lock:
            if self.error is not None:
                return self.error
            self.error = error
            self._failed.set()
            promised = [work for work in self._in_flight if work.promised]
        self.interrupt()
        if promised:
            threading.Thread(target=_finish, args=(promised,), name="keepstep-failed", daemon=True).start()
        return error

    def close(self) -> None:
        """Free everything, after ``fail``. Afterwards no operation writes to a tensor of the user."""
        with self._lock:
            in_flight = list(self._in_flight)
        _finish(in_flight)
        looking = self._looking
        if looking is not None:
            looking.join()
        backend, self.backend = [self.backend], None
        if backend[0] is not None:
            _dispose(backend)


_disposals: set[threading.Thread] = set()


def _dispose(backend: list[Backend | None]) -> None:
    """Free the backend in a thread: torch's destructor waits 20 ms for its own thread, and for sleeping operations."""

    def dispose() -> None:
        backend.clear()
        _disposals.discard(threading.current_thread())

    thread = threading.Thread(target=dispose, name="keepstep-disposal", daemon=True)
    _disposals.add(thread)
    thread.start()


@atexit.register
def _await_disposals() -> None:
    """Wait for threads in C++: one that returns while the interpreter shuts down would abort the process."""
    deadline = time.monotonic() + EXIT_SECONDS
    for thread in tuple(_disposals):
        thread.join(max(0.0, deadline - time.monotonic()))


class _AsleepError(TimeoutError):
    """The operation sleeps until its own timeout."""


class BackendWork(Work):
    """An operation in flight. ``tensors``: those that it writes or sends."""

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
    def promised(self) -> bool:
        """Whether ``get_future`` was called."""
        return self._future is not None

    def wait(self, timeout: timedelta = NO_TIMEOUT) -> bool:
        """Wait until the operation has ended, at most ``timeout`` (0: the operation's own). Return True.

        Raises:
            TimeoutError: the operation took too long. The group cannot be used until it is configured again.
            ProcessGroupError: the operation failed or was aborted. The same holds for the group.
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
                self._raw = None  # torch's work keeps the communicator's threads and sockets
            del raw  # so would a traceback
            if failed and self._error is not None:
                # not in the `except` block: its error would be the context of errors that callbacks raise
                self._communicator.fail(self._error)
                self.finish()
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> Future[Any]:
        """Return a future that completes with the tensors, or the error, when the operation has ended."""
        if self._future is None:
            raw = self._raw
            self._communicator.look_after_futures()
            self._future = Future(devices=list({one.device for one in _flat(self._tensors) if not one.is_cpu}))
            if raw is not None:
                self._watch(raw)
            if raw is None or self._communicator.error is not None:  # `fail` may have run before the future existed
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
        """Wait until the operation has released its tensors, after the communicator has failed."""
        raw = self._raw
        if raw is not None:
            try:
                self._await(raw, NO_TIMEOUT)
            except (RuntimeError, TimeoutError) as error:
                self._error = self._error or self._failure(error, NO_TIMEOUT)
            self._raw = None
        del raw  # callbacks of the future run now, and their errors would keep this frame
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
        """Wait in slices, so that a sleeping operation can be given up.

        Raises:
            RuntimeError: torch's error of the operation.
            TimeoutError: ``timeout`` has passed, or the operation sleeps on a failed communicator.
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
        """Wait up to ``limit``, and return whether the operation has ended."""
        try:
            raw.wait(limit)
        except RuntimeError as error:
            if _SLICE_IS_OVER in str(error):
                return False
            raise
        return True

    def _failure(self, error: Exception, timeout: timedelta) -> Exception:
        """Return the error of this operation: that of its communicator if it has failed, else one from ``error``."""
        first = self._communicator.error
        if first is not None:
            kind = ProcessGroupAbortedError if isinstance(first, ProcessGroupAbortedError) else ProcessGroupError
            return kind(f"{self._operation} failed: {first}")
        if isinstance(error, TimeoutError) or "imed out" in str(error):
            limit = timeout if timeout > NO_TIMEOUT else self._communicator.timeout
            return TimeoutError(f"{self._operation} took longer than {limit}: a peer is stuck, slow or gone")
        return ProcessGroupError(f"{self._operation} failed: {plain(error)}")


class ThreadedWork(BackendWork):
    """A send, receive or reduce-scatter over Gloo. torch has no future for it, and no wait with a time limit."""

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


def plain(error: Exception) -> str:
    """Return Gloo's message without places in its source and without its guess at the cause."""
    return _GLOO_ADVICE.sub("", _GLOO_PLACE.sub("", str(error)))


def _flat(tensors: Any) -> Iterator[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        yield tensors
    elif isinstance(tensors, list | tuple):
        for one in tensors:
            yield from _flat(one)
