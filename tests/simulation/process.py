"""A process in virtual time: an event loop with a clock of its own, which can be stopped, and killed.

Each simulated process is one ``ProcessLoop`` on the common ``Timeline``. Its code is real asyncio: tasks, timeouts and
locks find the loop as the running one while it runs, and its clock by ``loop.time()``, or as ``time`` in the modules
that ``clocks_of_processes`` lends it to. Nothing waits for real.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

from tests.simulation.network import Timeline

UNIX = 1_800_000_000.0
"""Unix time at the beginning of time."""
MAX_TURNS = 10_000
"""Of a loop at one moment: then it spins."""
TOO_SOON = 1e-6
"""Seconds that a timer comes later than asked for, so that rounding never makes it early."""

_ordinals = itertools.count(1)


class _Future(asyncio.Future[Any]):
    """Its place in a set does not depend on its address in memory: the same seed makes the same run."""

    def __init__(self, *, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop=loop)
        self._ordinal = next(_ordinals)

    def __hash__(self) -> int:
        return self._ordinal


class _Task(asyncio.Task[Any]):
    def __init__(self, *args: Any, **more: Any) -> None:
        self._ordinal = next(_ordinals)
        super().__init__(*args, **more)

    def __hash__(self) -> int:
        return self._ordinal


class ProcessLoop(asyncio.AbstractEventLoop):
    """``rate``: how fast its clock goes. ``on_fault`` is called with what nobody caught."""

    def __init__(self, timeline: Timeline, rate: float, on_fault: Callable[[str], None]) -> None:
        self._timeline = timeline
        self._rate = rate
        self._on_fault = on_fault
        self._ready: deque[asyncio.Handle] = deque()
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._tasks: set[_Task] = set()
        self._scheduled = self._running = False
        self._armed = float("inf")
        self._ahead = 0.0
        """Seconds that a dead process is ahead of the others while its tasks are ended."""
        self.asleep = False
        self.dead = False

    # ---- life

    def sleep(self) -> None:
        """SIGSTOP: nothing runs until ``wake``; what comes meanwhile waits."""
        self.asleep = True

    def wake(self) -> None:
        if self.asleep:
            self.asleep = False
            self._poke()

    def kill(self) -> None:
        """SIGKILL. Tasks are ended so that none is left; what they do then must reach nobody: the caller sees to it."""
        self.dead, self.asleep = True, False
        for _ in range(MAX_TURNS):
            pending = sorted((task for task in self._tasks if not task.done()), key=hash)
            if not pending:
                break
            for task in pending:
                task.cancel()
            self._turns()
            while self._timers and not all(task.done() for task in pending):
                self._ahead = max(self._ahead, self._timers[0][0] - self._timeline.now * self._rate)
                self._turns()
        else:
            raise RuntimeError(f"tasks do not end: {pending}")
        self._ready.clear()
        self._timers.clear()

    # ---- turns

    def _poke(self) -> None:
        if not (self._scheduled or self._running or self.asleep or self.dead):
            self._scheduled = True
            self._timeline.at(self._timeline.now, self._run)

    def _arm(self) -> None:
        if self._timers and not self.dead:
            due = self._timers[0][0] / self._rate + TOO_SOON
            if due < self._armed:
                self._armed = due
                self._timeline.at(due, self._due, due)

    def _due(self, due: float) -> None:
        if due == self._armed:
            self._armed = float("inf")
            self._poke()

    def _run(self) -> None:
        self._scheduled = False
        if not self.asleep and not self.dead:
            self._turns()
            self._arm()

    def _turns(self) -> None:
        self._running = True
        events._set_running_loop(self)
        try:
            for _ in range(MAX_TURNS):
                now = self.time()
                while self._timers and self._timers[0][0] <= now:
                    self._ready.append(heapq.heappop(self._timers)[2])
                if not self._ready:
                    return
                for _ in range(len(self._ready)):
                    handle = self._ready.popleft()
                    if not handle.cancelled():
                        handle._run()
            self._on_fault("the process goes round and round and time stands still")
        finally:
            events._set_running_loop(None)
            self._running = False

    # ---- what asyncio asks of a loop

    def time(self) -> float:
        return self._timeline.now * self._rate + self._ahead

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        self._poke()
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(_ordinals), handle))
        self._arm()
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is passed over when it comes."""

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, Any], *, name: str | None = None, context: Any = None) -> _Task:
        task = _Task(coro, loop=self, name=name, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.dead:
            self._on_fault(f"nobody caught: {context.get('message')} {context.get('exception')!r}")

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return False

    def get_debug(self) -> bool:
        return False


class _Clock:
    """Stands for the module ``time``."""

    def __init__(self, unix: Callable[[], float]) -> None:
        self.time = unix

    @staticmethod
    def monotonic() -> float:
        return asyncio.get_running_loop().time()


@contextmanager
def clocks_of_processes(timeline: Timeline, modules: list[ModuleType]) -> Iterator[None]:
    """In ``modules``, ``time`` is the clock of the process that runs."""
    clock = _Clock(lambda: UNIX + timeline.now)
    patches = [patch.object(module, "time", clock) for module in modules]
    for one in patches:
        one.start()
    try:
        yield
    finally:
        for one in patches:
            one.stop()
