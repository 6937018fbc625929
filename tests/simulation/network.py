"""Virtual time, and connections that are slow, ordered, and break."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from random import Random
from typing import Any, Protocol

FIN = object()
"""Comes last on a connection: the other side closed it, or it broke."""


class Timeline:
    """Runs callbacks in the order of their times; equal times in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._asked = 0

    def at(self, time: float, act: Callable[..., None], *args: Any) -> None:
        self._asked += 1
        heapq.heappush(self._queue, (max(time, self.now), self._asked, act, args))

    def after(self, delay: float, act: Callable[..., None], *args: Any) -> None:
        self.at(self.now + delay, act, *args)

    def run(self, until: float, done: Callable[[], bool]) -> None:
        """Runs until ``done`` says so or the time is up."""
        queue = self._queue
        while queue and queue[0][0] <= until and not done():
            self.now, _, act, args = heapq.heappop(queue)
            act(*args)


class End(Protocol):
    """One side of a connection."""

    def receive(self, connection: Connection, message: Any) -> None: ...


class Connection:
    """Two ordered streams between a worker and the lighthouse. What is on its way when it breaks may be lost.

    While it is parted nothing arrives, and neither side is told: what was sent waits until the network is back.
    """

    __slots__ = ("_arrives", "_held", "_open", "_random", "_time", "broken", "ends", "number", "parted")

    def __init__(self, number: int, worker: End, lighthouse: End, time: Timeline, random: Random) -> None:
        self.number = number
        self.ends = (worker, lighthouse)
        self.parted = False
        self.broken = False
        self._open = [True, True]
        self._arrives = [0.0, 0.0]
        self._held: list[tuple[int, Any]] = []
        self._time, self._random = time, random

    def send(self, sender: End, message: Any) -> None:
        """Delivered to the other side in order, after a while, unless the connection ends before."""
        if self.broken:
            return
        to = 1 if self.ends[0] is sender else 0
        random = self._random.random()
        delay = 0.0005 + 0.004 * random if random > 0.02 else 0.2 * self._random.random()
        self._arrives[to] = max(self._arrives[to], self._time.now + delay)
        self._time.at(self._arrives[to], self._deliver, to, message)

    def close(self, closer: End) -> None:
        """This side is done. The other side learns of it behind what was sent before."""
        self.send(closer, FIN)
        self._open[0 if self.ends[0] is closer else 1] = False

    def cut(self) -> None:
        """Broken for both; what is on its way is lost. Both sides learn of it, each when it does."""
        if not self.broken:
            self.broken = True
            for to in (0, 1):
                self._time.after(0.01 * self._random.random(), self._tell_broken, to)

    def _tell_broken(self, to: int) -> None:
        if self.parted:
            self._held.append((to, FIN))
        elif self._open[to]:
            self._open[to] = False
            self.ends[to].receive(self, FIN)

    def _deliver(self, to: int, message: Any) -> None:
        if self.parted:
            self._held.append((to, message))
        elif self._open[to] and (not self.broken or message is FIN):
            if message is FIN:
                self._open[to] = False
            self.ends[to].receive(self, message)

    @property
    def over(self) -> bool:
        return self.broken or not any(self._open)

    def part(self) -> None:
        self.parted = True

    def rejoin(self) -> None:
        self.parted = False
        held, self._held = self._held, []
        for to, message in held:
            self._deliver(to, message)
