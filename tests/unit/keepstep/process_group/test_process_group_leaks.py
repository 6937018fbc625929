"""Errors, futures and reconfigurations of a process group hold no tensor, connection, thread or child."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import Work

from keepstep.process_group import ProcessGroupError, ProcessGroupGloo
from keepstep.process_group.torch_backends import communicator
from keepstep.process_group.torch_backends.backend_work import BackendWork

LONG = timedelta(minutes=10)


@pytest.mark.parametrize("begins", [True, False], ids=["in an operation that fails", "before an operation"])
def test_an_error_that_somebody_keeps_holds_no_connection(cohort, begins) -> None:
    """A training script may log its errors later; their tracebacks must not keep Gloo's threads and sockets."""

    def epolls() -> int:
        return sum("eventpoll" in str(one.readlink()) for one in Path("/proc/self/fd").iterdir() if one.is_symlink())

    def fail(group: ProcessGroupGloo) -> Exception:
        with pytest.raises((ProcessGroupError, TimeoutError)) as caught:
            if begins:
                group.allreduce([torch.ones(1)]).wait(timedelta(seconds=0.1))
            else:
                group.abort("the lighthouse said so")
                group.allreduce([torch.ones(1)])
        return caught.value

    before = epolls()
    ranks = cohort(2)
    kept = [fail(ranks.groups[0])]
    for group in ranks.groups:
        group.shutdown()
    deadline = time.monotonic() + 30
    while epolls() > before and time.monotonic() < deadline:
        time.sleep(0.01)  # native code closes them: nothing tells when
    assert epolls() == before
    assert kept


def test_a_failed_collective_frees_its_tensors_though_its_future_was_read(cohort) -> None:
    ranks = cohort(2)
    errors: list[Exception] = []

    def read(future: torch.futures.Future[Any]) -> None:
        try:
            future.value()
        except ProcessGroupError as error:
            errors.append(error)

    tensor = torch.ones(2)
    freed = threading.Event()
    noticed = weakref.ref(tensor, lambda _: freed.set())
    work = ranks.groups[0].allreduce([tensor])
    work.get_future().then(read)
    ranks.groups[0].abort("the lighthouse said so")
    ranks.configure()
    assert "the lighthouse said so" in str(errors.pop())
    del work, tensor
    gc.collect()
    assert freed.wait(30), noticed  # the thread of the abort may hold it for a moment


class Idle(communicator.Communicator):
    """A communicator without connections."""

    def connect(self) -> None: ...

    def interrupt(self) -> None: ...


class Reset(Work):
    """An operation of torch whose wait notices the lost connection before its future does."""

    def wait(self, _timeout: timedelta = timedelta(0)) -> bool:
        raise RuntimeError("Connection reset by peer")

    def get_future(self) -> torch.futures.Future[Any]:
        return torch.futures.Future()


def test_an_error_that_the_reader_of_a_future_keeps_does_not_keep_the_operation(monkeypatch) -> None:
    monkeypatch.setattr(communicator, "_finish", lambda _: None)  # the waiting thread completes the future
    errors: list[Exception] = []

    def read(future: torch.futures.Future[Any]) -> None:
        try:
            future.value()
        except ProcessGroupError as error:
            errors.append(error)

    raw = Reset()
    freed = weakref.ref(raw)
    work = BackendWork(Idle(0, 2, LONG), raw, "allreduce", [torch.ones(2)])
    del raw
    work.get_future().then(read)
    with pytest.raises(ProcessGroupError, match="Connection reset by peer"):
        work.wait()
    gc.collect()
    assert errors
    assert freed() is None


def test_two_hundred_reconfigurations_leave_nothing_behind(cohort) -> None:
    ranks = cohort(2)

    def run(group, rank):
        group.allreduce([torch.ones(1000)]).wait()
        if ranks.quorum % 3 == 0:
            group.abort("every third ends badly")

    def counts() -> tuple[int, ...]:
        """Threads and descriptors of the process."""
        return tuple(sum(1 for _ in Path("/proc/self", what).iterdir()) for what in ("task", "fd"))

    def settled(most: tuple[int, ...]) -> bool:
        """Disposal ends a moment later, in native code that a test cannot join."""
        deadline = time.monotonic() + 30
        while any(one > limit for one, limit in zip(counts(), most, strict=True)) and time.monotonic() < deadline:
            time.sleep(0.01)  # threads and descriptors of native code: nothing tells when they are gone
        return all(one <= limit for one, limit in zip(counts(), most, strict=True))

    for _ in range(10):
        ranks.configure()
        ranks.each(run)
    before = counts()
    for _ in range(200):
        ranks.configure()
        ranks.each(run)
    assert settled(before), (before, counts())
