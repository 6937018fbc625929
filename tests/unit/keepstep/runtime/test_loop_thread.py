"""Waiting in one thread for a future of another thread's event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Iterator

import pytest

from keepstep.runtime.loop_thread import LoopThread, SharedLoopThread


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


def test_what_a_coroutine_returns_and_raises_reaches_the_thread_that_started_it(mesh):
    async def divided(by: int) -> float:
        await asyncio.sleep(0)
        return 1 / by

    assert mesh.spawn(divided(2)).result(30) == 0.5
    with pytest.raises(ZeroDivisionError):
        mesh.spawn(divided(0)).result(30)


def test_a_coroutine_whose_future_is_cancelled_is_cancelled_too(mesh):
    began, cancelled = threading.Event(), threading.Event()

    async def waits() -> None:
        began.set()
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            cancelled.set()

    future = mesh.spawn(waits())
    assert began.wait(30)
    assert future.cancel()
    assert cancelled.wait(30)


def test_a_future_of_a_coroutine_that_ends_cancelled_is_cancelled(mesh):
    async def ends() -> None:
        raise asyncio.CancelledError

    with pytest.raises(concurrent.futures.CancelledError):
        mesh.spawn(ends()).result(30)


def test_a_shared_thread_runs_from_the_first_user_to_the_last():
    shared = SharedLoopThread("test-shared")
    first, second = shared.take(), shared.take()
    assert first is second
    shared.give_back(first)
    assert second.call(asyncio.sleep(0, "runs"), 30.0) == "runs"
    shared.give_back(second)
    assert not first.is_alive
    third = shared.take()
    assert third is not first
    assert third.call(asyncio.sleep(0, "runs"), 30.0) == "runs"
    shared.give_back(first)  # a thread that has ended has no users
    assert third.is_alive
    shared.give_back(third)


def test_a_forked_child_gets_a_shared_thread_of_its_own():
    shared = SharedLoopThread("test-shared")
    taken = shared.take()
    child = os.fork()
    if not child:
        ended = 1
        try:
            own = shared.take()
            ended = 0 if own is not taken and own.call(asyncio.sleep(0, "runs"), 30.0) == "runs" else 2
        finally:
            os._exit(ended)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert taken.is_alive
    shared.give_back(taken)
