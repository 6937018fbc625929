"""Tasks that belong to one object: they end with it, and their errors are reported."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine


class OwnedTasks:
    """A set of tasks on one loop.

    Args:
        on_error: called with the exception of a task.
    """

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        self._running: set[asyncio.Task[None]] = set()

    def start(self, coroutine: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Run ``coroutine`` as a task."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._running.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)

    async def close(self) -> None:
        """Cancel all tasks, and wait for their end."""
        running = tuple(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
