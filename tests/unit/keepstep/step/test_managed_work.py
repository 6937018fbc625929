"""The work of a Manager reports every error, and raises none."""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

from torch.distributed.distributed_c10d import Work
from torch.futures import Future

from keepstep.process_group.works import CompletedWork
from keepstep.step.reduction import ManagedWork


class Reduces(Work):
    """A collective of a process group on main memory."""

    ends_in_wait = True

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.futures = 0
        self.over = threading.Event()
        self._error = error

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:  # noqa: ARG002
        assert self.over.wait(30)
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> Future[Any]:
        self.futures += 1
        future: Future[Any] = Future()

        def complete() -> None:
            assert self.over.wait(30)
            future.set_result(None)

        threading.Thread(target=complete).start()
        return future

    def is_completed(self) -> bool:
        return self.over.is_set()


def test_the_thread_that_waits_ends_a_collective_whose_future_nobody_wants() -> None:
    ended_by: list[threading.Thread] = []
    work = ManagedWork(raw := Reduces(), "value", lambda: ended_by.append(threading.current_thread()))
    assert not work.is_completed()
    raw.over.set()
    assert work.is_over
    assert not ended_by
    assert work.is_completed()
    assert work.wait()
    assert work.get_future().value() == "value"
    assert ended_by == [threading.current_thread()]
    assert raw.futures == 0


def test_a_future_that_is_wanted_during_a_wait_completes_and_the_collective_ends_once() -> None:
    ended: list[bool] = []
    work = ManagedWork(raw := Reduces(), "value", lambda: ended.append(True))
    waiting = threading.Thread(target=work.wait)
    waiting.start()
    future = work.get_future()
    raw.over.set()
    waiting.join(30)
    assert future.wait() == "value"
    assert ended == [True]


def test_an_error_of_a_collective_is_reported_once() -> None:
    errors: list[Exception] = []
    error = RuntimeError("a peer was lost")
    raw = Reduces(error)
    raw.over.set()
    work = ManagedWork(raw, "value", report=errors.append)
    assert not work.wait()
    assert not work.wait()
    assert work.get_future().value() == "value"
    assert errors == [error]


def test_a_callback_that_fails_is_reported_as_an_error_of_the_step() -> None:
    def no_memory() -> None:
        raise MemoryError

    errors: list[Exception] = []
    work = ManagedWork(CompletedWork([]), [], report=errors.append, ended=no_memory)
    assert not work.wait()
    assert "MemoryError" in str(errors)
