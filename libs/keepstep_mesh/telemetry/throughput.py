"""How fast bytes move, from how many have: over the last seconds, so that a stop shows. Pure."""

from __future__ import annotations

from collections import deque

WINDOW = 5.0
"""Seconds that a rate looks back."""
GRAIN = 0.1
"""Seconds; of counts that are closer together the last is kept."""


class ThroughputMeter:
    """Of something that began at ``now`` (seconds of a clock that only goes forward) with no byte."""

    def __init__(self, now: float) -> None:
        self._counts = deque([(now, 0)])

    def count(self, total_bytes: int, now: float) -> None:
        """So many have moved since the beginning. Fewer than before: it begins anew from there."""
        if total_bytes < self._counts[-1][1]:
            self._counts.clear()
        elif len(self._counts) > 1 and now - self._counts[-2][0] < GRAIN:
            self._counts.pop()
        self._counts.append((now, total_bytes))
        self._forget(now)

    def rate(self, now: float) -> float:
        """Bytes a second over the last ``WINDOW``, or since the beginning."""
        self._forget(now)
        since, before = self._counts[0]
        return (self._counts[-1][1] - before) / max(now - since, GRAIN)

    def _forget(self, now: float) -> None:
        while len(self._counts) > 1 and self._counts[1][0] <= now - WINDOW:
            self._counts.popleft()
