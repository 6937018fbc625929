"""An operation in flight on a communicator: wait, future, and failure.

``wait`` returns or raises only after the operation has released its tensors, so that a late result never overwrites a
gradient.

Gloo does not wake an operation whose peer disconnects in the middle of a message; it wakes only operations whose
message has not begun. Such an operation sleeps until its own timeout and writes to no tensor. Therefore a wait checks
whether all peers are still connected, and abandons an operation that sleeps on a failed communicator after
``PATIENCE``, which is much longer than an operation that still runs can take.

torch drops a callback that gets no memory. The peer watch of the communicator calls ``finish`` for such an operation,
so that its future completes.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import re
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.distributed_c10d import Work
from torch.futures import Future

from keepstep.process_group.group_errors import (
    ProcessGroupAbortedError,
    ProcessGroupError,
    UnsupportedCollectiveError,
    timed_out,
)
from keepstep.process_group.torch_backends.communicator import LOOK, PEER_IS_GONE, SLICE, STALL, Communicator
from keepstep.runtime.exits import must_succeed
from keepstep.runtime.failed_future import complete_future
from keepstep_mesh.threads.starting import Thread

NO_TIMEOUT = timedelta(0)
"""Tells torch to use the timeout of the operation."""
INSTANT = timedelta(milliseconds=1)
"""The shortest slice; for torch 0 means no limit."""
PATIENCE = 6
"""Limit of a wait on a failed communicator, in slices; plus one for each ``PATIENCE_BYTES`` of its tensors."""
PATIENCE_BYTES = 10_000_000

_SLICE_IS_OVER = "Operation timed out!"
_GLOO_PLACE = re.compile(r"\[/[^\]]*\] ")
_GLOO_REFUSES = ("Invalid scalar type", "Cannot use ReduceOp")
"""Beginnings of Gloo's messages about an operation that it does not have, which it raises when the operation runs."""
_GLOO_ADVICE = re.compile(r"\. This is typically caused by .*", re.DOTALL)


class _AsleepError(TimeoutError):
    """The operation sleeps until its own timeout."""


class BackendWork(Work):
    """An operation in flight. ``tensors``: the tensors that it writes or sends."""

    ends_in_wait = True
    """Whether the operation is over when ``wait`` returns, so that no caller needs its future for that."""

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
            except Exception as error:  # noqa: BLE001  torch raises types of many kinds; MemoryError: std::bad_alloc
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
            future: Future[Any] = Future(
                devices=list({one.device for one in flat_tensors(self._tensors) if not one.is_cpu})
            )
            self._communicator.watch_future(self)
            self._future = future
            if raw is not None:
                self._watch(raw)
            if raw is None or self._communicator.error is not None:  # `fail` may have missed this future
                self.finish()
        return self._future

    def is_completed(self) -> bool:
        raw = self._raw  # another thread may end the operation now
        return raw is None or raw.is_completed()

    def is_success(self) -> bool:
        return self._error is None if self._raw is None else self._raw.is_success()

    def exception(self) -> Any:
        return self._error if self._raw is None else self._raw.exception()

    def result(self) -> list[torch.Tensor]:
        return list(self._tensors) if self._raw is None else self._raw.result()

    def synchronize(self) -> None:
        if self._raw is not None:
            self._raw.synchronize()

    @must_succeed("the end of an operation")
    def finish(self) -> None:
        """Wait until an operation has released its tensors that is completed, or whose communicator failed."""
        raw = self._raw
        if raw is not None:
            try:
                self._await(raw, NO_TIMEOUT)
            except Exception as error:
                if isinstance(error, MemoryError) and not raw.is_completed():
                    raise  # this wait had no memory; the operation may still write to its tensors
                self._error = self._error or self._failure(error, NO_TIMEOUT)
            self._raw = None
        del raw  # callbacks of the future run now; their errors would hold this frame
        if self._error is not None:
            self._communicator.fail(self._error)
        self._settle()

    def _watch(self, raw: Work) -> None:
        raw.get_future().add_done_callback(lambda future: self._arrived(future.value))

    def _arrived(self, outcome: Callable[[], Any]) -> None:
        try:
            outcome()
        except Exception as error:  # noqa: BLE001  as in `wait`
            self._error = self._failure(error, NO_TIMEOUT)
            self._communicator.fail(self._error)
        self._raw = None
        self._settle()

    def _settle(self) -> None:
        if self._future is None or not self._settling.acquire(blocking=False):
            return
        complete_future(self._future, self._tensors, self._error)
        self._communicator.completed(self)

    def _await(self, raw: Work, timeout: timedelta) -> None:
        """Wait in slices, so that a wait can abandon an operation that never wakes.

        Raises:
            RuntimeError: the error of torch.
            TimeoutError: ``timeout`` or the limit of waits on a failed communicator has passed.
        """
        deadline = time.monotonic() + timeout.total_seconds() if timeout > NO_TIMEOUT else float("inf")
        communicator = self._communicator
        patience = PATIENCE + sum(tensor.nbytes for tensor in flat_tensors(self._tensors)) // PATIENCE_BYTES
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
            return kind(f"{self._operation} failed: {plain_message(first)}")
        if isinstance(error, TimeoutError) or "imed out" in str(error):
            limit = timeout if timeout > NO_TIMEOUT else self._communicator.timeout
            return timed_out(self._operation, limit)
        message = plain_message(error)
        refused = UnsupportedCollectiveError if message.startswith(_GLOO_REFUSES) else ProcessGroupError
        return refused(f"{self._operation} failed and aborted the process group: {message}")


class GlooWork(BackendWork):
    """An operation over Gloo, which runs in a thread of torch."""

    _raw: Work | None = None

    def __del__(self) -> None:
        raw = self._raw
        if raw is not None and not self._communicator.is_forked and not raw.is_completed():
            self._communicator.has_forgotten = True


class ThreadedWork(GlooWork):
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
            try:
                Thread(target=_wait_into, args=(raw, waiting), name="keepstep-wait", daemon=True).start()
            except (RuntimeError, MemoryError) as error:
                waiting.set_exception(error.with_traceback(None))
        return waiting


@must_succeed("the wait for an operation")
def _wait_into(raw: Work, outcome: concurrent.futures.Future[None]) -> None:
    try:
        raw.wait()
    except Exception as error:  # noqa: BLE001  the waiting thread gets it
        outcome.set_exception(error.with_traceback(None))
    else:
        outcome.set_result(None)


def plain_message(error: Exception) -> str:
    """Return Gloo's message without its source locations and advice. A MemoryError has no message."""
    return _GLOO_ADVICE.sub("", _GLOO_PLACE.sub("", str(error))) or type(error).__name__


def flat_tensors(tensors: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists and tuples; other values are left out."""
    if isinstance(tensors, torch.Tensor):
        yield tensors
    elif isinstance(tensors, list | tuple):
        for one in tensors:
            yield from flat_tensors(one)
