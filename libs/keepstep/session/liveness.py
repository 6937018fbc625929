"""Detect a silent peer, and schedule heartbeats. Pure: time is an argument.

After half the heartbeat timeout without a message the peer gets a ping; after another half it counts as silent. A
process that was paused in between (*stalled*) sends another ping first, because it could not receive anything.
"""

from __future__ import annotations

from typing import Literal


class Liveness:
    """``interval`` and ``timeout`` of heartbeats in seconds; times are those of the event loop."""

    def __init__(self, interval: float, timeout: float) -> None:
        self.interval = interval
        self.timeout = timeout
        self.silent = False
        """Whether the last session ended because the peer was silent."""
        self._last_sent = 0.0
        self._asked: float | None = None

    def begins(self, now: float) -> None:
        """Start with a new session."""
        self._last_sent = now
        self._asked, self.silent = None, False

    def sent(self, now: float) -> None:
        self._last_sent = now

    @property
    def beat_due(self) -> float:
        """Time of the next heartbeat, if no message is sent before."""
        return self._last_sent + self.interval

    def is_late(self, now: float, due: float) -> bool:
        """Return whether a timer due at ``due`` fires so late that this process was paused."""
        return now - due > self.timeout / 4

    def judge(self, now: float, heard: float, *, stalled: bool) -> Literal["lives", "ask", "silent"] | None:
        """Judge a peer last heard at ``heard``.

        Return ``"lives"``; ``"ask"``: send a ping; ``"silent"``: close the connection; None: wait for the answer to
        the ping.
        """
        half = self.timeout / 2
        if now - heard < half:
            self._asked = None
            return "lives"
        if self._asked is None or stalled:
            self._asked = now
            return "ask"
        self.silent = now - self._asked >= half
        return "silent" if self.silent else None
