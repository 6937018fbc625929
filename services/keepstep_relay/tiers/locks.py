"""Who waits for whom: turns at one thing, and bells that are rung when something has come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Turn:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    users: int = 0


class KeyedLock:
    """``async with turns(key)``: one at a time for each key, in the order in which they came."""

    def __init__(self) -> None:
        self._turns: dict[Hashable, _Turn] = {}

    @asynccontextmanager
    async def __call__(self, key: Hashable) -> AsyncIterator[None]:
        turn = self._turns.setdefault(key, _Turn())
        turn.users += 1
        try:
            async with turn.lock:
                yield
        finally:
            turn.users -= 1
            if not turn.users:
                del self._turns[key]


class Notifier:
    """Whoever waits for a key is woken by the next ``ring`` of it, and has to look whether it is what he waits for."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, set[asyncio.Future[None]]] = {}
        self.count = 0
        """Who wait now."""

    def ring(self, key: Hashable) -> None:
        for one in self._waiting.pop(key, ()):
            if not one.done():
                one.set_result(None)

    async def wait(self, key: Hashable, deadline: float) -> None:
        """``deadline``: of the loop's clock. Raises ``TimeoutError``."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, set()).add(future)
        self.count += 1
        try:
            async with asyncio.timeout_at(deadline):
                await future
        finally:
            self.count -= 1
            waiting = self._waiting.get(key)
            if waiting is not None:
                waiting.discard(future)
                if not waiting:
                    del self._waiting[key]
