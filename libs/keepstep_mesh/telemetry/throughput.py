"""Measure the rate of a transfer over the last seconds, so that a stall shows. Pure."""

from __future__ import annotations

from collections import deque

WINDOW = 5.0
"""Seconds over which the rate is measured."""
GRAIN = 0.1
"""Seconds; of counts that are closer together, only the last is kept."""


class ThroughputMeter:
    """The rate of a transfer that began at ``now`` (monotonic clock, seconds) with 0 bytes."""

    def __init__(self, now: float) -> None:
        self._counts = deque([(now, 0)])

    def count(self, total_bytes: int, now: float) -> None:
        """Note the bytes transferred since the beginning. Fewer than before: the transfer started over."""
        if total_bytes < self._counts[-1][1]:
            self._counts.clear()
        elif len(self._counts) > 1 and now - self._counts[-2][0] < GRAIN:
            self._counts.pop()
        self._counts.append((now, total_bytes))
        self._forget(now)

    def rate(self, now: float) -> float:
        """Return the bytes per second over the last ``WINDOW`` seconds, or since the beginning."""
        self._forget(now)
        since, before = self._counts[0]
        return (self._counts[-1][1] - before) / max(now - since, GRAIN)

    def _forget(self, now: float) -> None:
        while len(self._counts) > 1 and self._counts[1][0] <= now - WINDOW:
            self._counts.popleft()
