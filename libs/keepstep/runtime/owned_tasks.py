"""Tasks that belong to one object: they end with it, and what breaks one of them is told."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine


class OwnedTasks:
    """Used on one loop.

    Args:
        on_error: gets what a task raised.
    """

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        self._running: set[asyncio.Task[None]] = set()

    def start(self, coroutine: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._running.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)

    async def close(self) -> None:
        """Cancels what still runs and waits for its end."""
        running = tuple(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
