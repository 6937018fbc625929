"""Estimate how far the clock of another machine is ahead, from requests and their answers. Pure."""

from __future__ import annotations

from collections import deque

SAMPLES = 16
STEP_SECONDS = 0.02
"""Smaller changes of the estimate are noise, which must not move times that were in order."""


class ClockOffset:
    """The offset of the last ``SAMPLES`` exchanges whose packets took the least time, as in NTP."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float]] = deque(maxlen=SAMPLES)
        self.seconds = 0.0
        """Their clock minus ours; 0 before the first exchange. Changes in steps of at least ``STEP_SECONDS``."""

    def add(self, sent: float, received: float, answered: float, arrived: float) -> None:
        """Note one exchange.

        Args:
            sent: Unix time here, when the request was sent.
            received: Unix time there, when it arrived.
            answered: Unix time there, when the answer was sent.
            arrived: Unix time here, when the answer arrived.
        """
        delay = (arrived - sent) - (answered - received)
        if delay < 0:  # a clock was set in between
            self._samples.clear()
            self.seconds = 0.0
            return
        self._samples.append((delay, ((received - sent) + (answered - arrived)) / 2))
        estimate = min(self._samples)[1]
        if abs(estimate - self.seconds) >= STEP_SECONDS:
            self.seconds = estimate
