"""A process in virtual time: an asyncio event loop with its own clock that can be paused and killed.

Each simulated process is one ``ProcessLoop`` on the common ``Timeline``. Its code is real asyncio: tasks, timeouts and
locks find the loop as the running one, and read its clock as ``loop.time()``, or as ``time`` in the modules that
``replaced`` gives a ``ProcessClock``. Nothing waits in real time.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from asyncio import events
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from tests.simulation.virtual.network import Timeline

UNIX = 1_800_000_000.0
"""Unix time at virtual time 0."""
MAX_TURNS = 10_000
"""Turns of a loop at one moment. A loop that needs more spins."""
TIMER_DELAY = 1e-6
"""Seconds by which a timer fires late, so that rounding never makes it fire early."""

_ordinals = itertools.count(1)


def begin_ordinals() -> None:
    """Count the futures and tasks of a new simulation from 1: it must not depend on those that ran before it."""
    global _ordinals
    _ordinals = itertools.count(1)


class _Future(asyncio.Future[Any]):
    """A future whose place in a set does not depend on its address in memory: equal seeds give equal runs."""

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


class _Handle:
    """A callback of a loop. Unlike ``asyncio.Handle`` it keeps no context, which costs more than the callbacks do."""

    __slots__ = ("_args", "_callback", "_cancelled", "_when")

    def __init__(self, callback: Callable[..., Any], args: tuple[Any, ...], when: float = 0.0) -> None:
        self._callback, self._args, self._when = callback, args, when
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True

    def cancelled(self) -> bool:
        return self._cancelled

    def when(self) -> float:
        return self._when

    def run(self, loop: ProcessLoop) -> None:
        if not self._cancelled:
            try:
                self._callback(*self._args)
            except Exception as error:  # noqa: BLE001 - as asyncio.Handle does
                loop.call_exception_handler({"message": f"exception in {self._callback}", "exception": error})


class ProcessLoop(asyncio.AbstractEventLoop):
    """The event loop of one process.

    Args:
        rate: Seconds of its clock per second of the timeline.
        on_fault: Called with a description of each exception that nothing caught.
    """

    def __init__(self, timeline: Timeline, rate: float, on_fault: Callable[[str], None]) -> None:
        self._timeline = timeline
        self._rate = rate
        self._on_fault = on_fault
        self._ready: deque[_Handle] = deque()
        self._timers: list[tuple[float, int, _Handle]] = []
        self._tasks: set[_Task] = set()
        self._scheduled = self._running = False
        self._armed = float("inf")
        self._ahead = 0.0
        """Seconds by which a killed process is ahead of the timeline while its tasks end."""
        self.asleep = False
        self.dead = False

    # ---- life

    def sleep(self) -> None:
        """Stop as SIGSTOP does: nothing runs until ``wake``; callbacks queue up until then."""
        self.asleep = True

    def wake(self) -> None:
        if self.asleep:
            self.asleep = False
            self._poke()

    def kill(self) -> None:
        """End as SIGKILL does. All tasks are cancelled to leave none behind; the caller discards their effects."""
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

    def deliver(self, callback: Callable[..., Any], *args: Any) -> None:
        """Call ``callback`` in this process: at once if it is idle, which saves a turn of the timeline."""
        if self._scheduled or self.asleep or self.dead or events._get_running_loop() is not None:
            self.call_soon(callback, *args)
        else:
            self._ready.append(_Handle(callback, args))
            self._run()

    # ---- turns

    def _poke(self) -> None:
        if not (self._scheduled or self._running or self.asleep or self.dead):
            self._scheduled = True
            self._timeline.at(self._timeline.now, self._run)

    def _arm(self) -> None:
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if timers and not self.dead:
            due = timers[0][0] / self._rate + TIMER_DELAY
            if due < self._armed:
                self._armed = due
                self._timeline.at(due, self._due, due)

    def _due(self, due: float) -> None:
        if due == self._armed:
            self._armed = float("inf")
            if not self._scheduled and not self.asleep and not self.dead:
                self._run()

    def _run(self) -> None:
        self._scheduled = False
        if not self.asleep and not self.dead:
            self._turns()
            self._arm()

    def _turns(self) -> None:
        self._running = True
        events._set_running_loop(self)
        try:
            ready, timers, now = self._ready, self._timers, self.time()
            for _ in range(MAX_TURNS):
                while timers and timers[0][0] <= now:
                    ready.append(heapq.heappop(timers)[2])
                if not ready:
                    return
                for _ in range(len(ready)):
                    ready.popleft().run(self)
            self._on_fault("the process spins: its tasks go on for ever and time does not")
        finally:
            events._set_running_loop(None)
            self._running = False

    # ---- the interface of an asyncio loop

    def time(self) -> float:
        return self._timeline.now * self._rate + self._ahead

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Any = None) -> _Handle:  # type: ignore[override]  # noqa: ARG002
        handle = _Handle(callback, args)
        self._ready.append(handle)
        if not (self._scheduled or self._running):
            self._poke()
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> _Handle:  # type: ignore[override]
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, context: Any = None) -> _Handle:  # type: ignore[override]  # noqa: ARG002
        handle = _Handle(callback, args, when)
        heapq.heappush(self._timers, (when, next(_ordinals), handle))
        if not self._running:
            self._arm()
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return _Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None) -> _Task:
        task = _Task(coro, loop=self, name=name, context=context)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self.dead:
            self._on_fault(f"uncaught: {context.get('message')} {context.get('exception')!r}")

    def is_running(self) -> bool:
        return self._running

    def is_closed(self) -> bool:
        return False

    def get_debug(self) -> bool:
        return False


class ProcessClock:
    """Stands for the module ``time``: its clocks are those of the process that runs."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline

    def time(self) -> float:
        return UNIX + self._timeline.now

    @staticmethod
    def monotonic() -> float:
        return events._get_running_loop().time()  # type: ignore[union-attr]


@contextmanager
def replaced(replacements: Iterable[tuple[ModuleType, str, Any]]) -> Iterator[None]:
    """Give modules other attributes while this lasts. ``unittest.mock.patch`` takes a hundred times as long."""
    before = []
    try:
        for module, name, value in replacements:
            before.append((module, name, getattr(module, name)))
            setattr(module, name, value)
        yield
    finally:
        for module, name, value in reversed(before):
            setattr(module, name, value)
