"""Virtual time, and connections that delay, order and lose messages."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from random import Random
from typing import Any, Protocol

FIN = object()
"""The last message of a connection: the peer closed it, or it broke."""


class Timeline:
    """Run callbacks in the order of their times; callbacks of equal times in the order of their registration."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._registered = 0
        self._stopped = False

    def at(self, time: float, act: Callable[..., object], *args: Any) -> None:
        self._registered += 1
        heapq.heappush(self._queue, (max(self.now, time), self._registered, act, args))

    def after(self, delay: float, act: Callable[..., object], *args: Any) -> None:
        self._registered += 1
        heapq.heappush(self._queue, (self.now + delay, self._registered, act, args))

    def run(self, until: float) -> None:
        """Run until ``stop`` is called or the clock shows ``until``."""
        queue, pop = self._queue, heapq.heappop
        while queue and not self._stopped and queue[0][0] <= until:
            self.now, _, act, args = pop(queue)
            act(*args)

    def stop(self) -> None:
        self._stopped = True


class End(Protocol):
    """One side of a connection."""

    def receive(self, connection: Connection, message: Any) -> None: ...


class Connection:
    """Two ordered streams between a client and a lighthouse. Messages in flight may be lost when it breaks.

    A partition delays messages silently: they arrive when the network is whole again, and neither end is notified.
    """

    __slots__ = ("_arrives", "_held", "_open", "_random", "_time", "broken", "ends", "partitioned")

    def __init__(self, client: End, lighthouse: End, time: Timeline, random: Random) -> None:
        self.ends = (client, lighthouse)
        self.partitioned = False
        self.broken = False
        self._open = [True, True]
        self._arrives = [0.0, 0.0]
        self._held: list[tuple[int, Any]] = []
        self._time, self._random = time, random

    def send(self, sender: End, message: Any) -> None:
        """Deliver ``message`` to the other end, after all earlier messages and a delay, unless the connection ends."""
        if self.broken:
            return
        to = 1 if self.ends[0] is sender else 0
        random = self._random.random()
        delay = 0.0005 + 0.004 * random if random > 0.02 else 0.2 * self._random.random()
        arrives = self._arrives[to] = max(self._arrives[to], self._time.now + delay)
        self._time.at(arrives, self._deliver, to, message)

    def close(self, closer: End) -> None:
        """Close this end. The other end is notified after the messages sent before."""
        self.send(closer, FIN)
        self._open[0 if self.ends[0] is closer else 1] = False

    def cut(self) -> None:
        """Break the connection and lose all messages in flight. Both ends are notified, each after its own delay."""
        if not self.broken:
            self.broken = True
            for to in (0, 1):
                self._time.after(0.01 * self._random.random(), self._notify_broken, to)

    def _notify_broken(self, to: int) -> None:
        if self.partitioned:
            self._held.append((to, FIN))
        elif self._open[to]:
            self._open[to] = False
            self.ends[to].receive(self, FIN)

    def _deliver(self, to: int, message: Any) -> None:
        if self.partitioned:
            self._held.append((to, message))
        elif self._open[to] and (not self.broken or message is FIN):
            if message is FIN:
                self._open[to] = False
            self.ends[to].receive(self, message)

    @property
    def is_over(self) -> bool:
        return self.broken or not any(self._open)

    def partition(self) -> None:
        self.partitioned = True

    def rejoin(self) -> None:
        """End the partition and deliver the held messages."""
        self.partitioned = False
        held, self._held = self._held, []
        for to, message in held:
            self._deliver(to, message)
