"""Whether the other end of a session lives, and when it wants to hear of us. Pure: time is an argument.

Half the heartbeat timeout without a sign of life, and it is asked (a ping); another half without one, and it is silent.
Who slept meanwhile (*stalled*) has heard nothing for a reason of its own, and asks once more.
"""

from __future__ import annotations

from typing import Literal


class Liveness:
    """``interval``, ``timeout``: of heartbeats, seconds; times are those of the loop."""

    def __init__(self, interval: float, timeout: float) -> None:
        self.interval = interval
        self.timeout = timeout
        self.silent = False
        """Whether the last session ended because of it."""
        self._last_sent = 0.0
        self._asked: float | None = None

    def begins(self, now: float) -> None:
        """A session is there."""
        self._last_sent = now
        self._asked, self.silent = None, False

    def sent(self, now: float) -> None:
        self._last_sent = now

    @property
    def beat_due(self) -> float:
        """When a heartbeat is to be sent, if nothing else is before."""
        return self._last_sent + self.interval

    def is_late(self, now: float, due: float) -> bool:
        """Whether a timer that was due at ``due`` fires so late that we slept."""
        return now - due > self.timeout / 4

    def judge(self, now: float, heard: float, *, stalled: bool) -> Literal["lives", "ask", "silent"] | None:
        """``heard``: the last sign of life. None: it was asked, and has time to answer."""
        half = self.timeout / 2
        if now - heard < half:
            self._asked = None
            return "lives"
        if self._asked is None or stalled:
            self._asked = now
            return "ask"
        self.silent = now - self._asked >= half
        return "silent" if self.silent else None
