"""The end of a task of the event loop."""

from __future__ import annotations

import asyncio
import contextlib


async def cancelled(task: asyncio.Task[None]) -> None:
    """Cancel ``task`` and wait for its end. Raises its error, if it failed."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
