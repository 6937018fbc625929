"""A timer of the event loop that can be moved."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Alarm:
    """Calls ``ring`` on the running event loop at the time that was set last."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._handle: asyncio.TimerHandle | None = None
        self.due: float | None = None
        """Time that was set last, also after it has passed (uvloop's handles do not always know it); None: never."""

    def set(self, when: float | None) -> None:
        """Ring at ``when``, a time of the event loop, and not before; None: do not ring."""
        if self._handle is not None:
            self._handle.cancel()
        self.due = when
        self._handle = None if when is None else asyncio.get_running_loop().call_at(when, self._ring)

    def set_by(self, when: float) -> None:
        """Ring at ``when`` at the latest."""
        if self.due is None or when < self.due:
            self.set(when)
