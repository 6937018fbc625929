"""Waiting in one thread for a future of another thread's event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Iterator

import pytest

from keepstep.runtime.loop_thread import LoopThread


@pytest.fixture
def mesh() -> Iterator[LoopThread]:
    thread = LoopThread("test-loop")
    yield thread
    thread.stop()


def test_the_result_of_the_future_is_returned(mesh):
    def start() -> asyncio.Future[str]:
        future = mesh.loop.create_future()
        mesh.loop.call_soon(future.set_result, "done")
        return future

    assert mesh.wait_for(start, 30.0) == "done"


def test_an_error_of_start_is_raised_in_the_caller(mesh):
    def start() -> asyncio.Future[str]:
        raise ValueError("no such step")

    with pytest.raises(ValueError, match="no such step"):
        mesh.wait_for(start, 30.0)


def test_a_future_that_is_not_done_in_time_is_cancelled(mesh):
    cancelled = threading.Event()

    def start() -> asyncio.Future[str]:
        future = mesh.loop.create_future()
        future.add_done_callback(lambda one: cancelled.set() if one.cancelled() else None)
        return future

    with pytest.raises(TimeoutError, match=r"not done within 0\.01 s"):
        mesh.wait_for(start, 0.01)
    assert cancelled.wait(30)


def test_many_threads_wait_at_once(mesh):
    started: list[asyncio.Future[int]] = []

    def start() -> asyncio.Future[int]:
        started.append(mesh.loop.create_future())
        if len(started) == 50:
            for number, future in enumerate(started):
                future.set_result(number)
        return started[-1]

    with concurrent.futures.ThreadPoolExecutor(50) as pool:
        waiting = [pool.submit(mesh.wait_for, start, 30.0) for _ in range(50)]
        assert sorted(one.result(60) for one in waiting) == list(range(50))


def test_a_wait_that_cannot_begin_fails_at_once(mesh):
    class NoMemory(asyncio.Future[str]):
        def add_done_callback(self, *_: object, **__: object) -> None:
            raise MemoryError

    with pytest.raises(MemoryError):
        mesh.wait_for(lambda: NoMemory(loop=mesh.loop), 30.0)


def test_an_ended_thread_is_refused():
    thread = LoopThread("test-loop")
    thread.stop()
    with pytest.raises(RuntimeError, match="'test-loop' has ended"):
        thread.wait_for(thread.loop.create_future, 1.0)


def test_the_end_of_the_thread_ends_every_wait():
    thread = LoopThread("test-loop")
    started = threading.Event()

    def start() -> asyncio.Future[str]:
        started.set()
        return thread.loop.create_future()

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(thread.wait_for, start, 60.0)
        assert started.wait(30)
        thread.stop()
        with pytest.raises(RuntimeError, match="'test-loop' has ended"):
            waiting.result(30)
