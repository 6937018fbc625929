"""Wake the streams of a job when it changes."""

from __future__ import annotations

import asyncio
import contextlib


class ChangeNotifier:
    """Wakes everybody who waits for news of a job."""

    def __init__(self) -> None:
        self._bells: dict[str, asyncio.Event] = {}
        self.streams = 0

    def ring(self, job: str) -> None:
        if (bell := self._bells.pop(job, None)) is not None:
            bell.set()

    def ring_all(self) -> None:
        for job in [*self._bells]:
            self.ring(job)

    async def wait(self, job: str, seconds: float) -> None:
        """Returns when there is some, after ``seconds``, or when another who waited goes."""
        bell = self._bells.setdefault(job, asyncio.Event())
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await bell.wait()
        finally:
            if not bell.is_set():
                self.ring(job)  # a job of any name may be asked for, and may never come
