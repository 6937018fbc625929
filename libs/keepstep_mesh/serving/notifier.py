"""Wake the tasks that wait for a change of a key."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable


class Notifier:
    """A task that ``notify`` wakes has to check itself whether its condition holds now."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, set[asyncio.Future[None]]] = {}
        self.waiters = 0
        """Number of tasks that wait now."""

    def notify(self, key: Hashable) -> None:
        """Wake all tasks that wait for ``key``."""
        for future in self._waiting.pop(key, ()):
            if not future.done():
                future.set_result(None)

    def notify_all(self) -> None:
        """Wake all waiting tasks."""
        for key in [*self._waiting]:
            self.notify(key)

    async def wait(self, key: Hashable, deadline: float) -> None:
        """Return at the next ``notify`` of ``key``.

        Args:
            key: Any hashable value.
            deadline: By the clock of the event loop.

        Raises:
            TimeoutError: The deadline passed.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, set()).add(future)
        self.waiters += 1
        try:
            async with asyncio.timeout_at(deadline):
                await future
        finally:
            self.waiters -= 1
            waiting = self._waiting.get(key)
            if waiting is not None:
                waiting.discard(future)
                if not waiting:
                    del self._waiting[key]
