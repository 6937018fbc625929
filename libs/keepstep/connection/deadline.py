"""The deadline of a transfer."""

from __future__ import annotations

import time

from keepstep.state.errors import TransferTimeout


class Deadline:
    """The deadline of a transfer.

    Args:
        seconds: time limit of the transfer; with ``limit``, the longest time without progress.
        what: begins the message of ``TransferTimeout``: the step and where it comes from.
        limit: time limit of the transfer, in seconds. Default: ``seconds``.
    """

    def __init__(self, seconds: float, what: str, limit: float | None = None) -> None:
        now = time.monotonic()
        self.seconds = seconds
        self._what = what
        self._limit = seconds if limit is None else limit
        self._last = now + self._limit
        self._end = min(now + seconds, self._last)

    def progressed(self) -> None:
        """Restart the time without progress."""
        self._end = min(time.monotonic() + self.seconds, self._last)

    def remaining(self) -> float:
        """Return the seconds left, always positive. Raises ``TransferTimeout`` after the deadline."""
        left = self._end - time.monotonic()
        if left <= 0:
            stalled = self._end < self._last
            why = f": no progress for {self.seconds:.1f} s" if stalled else f" within {self._limit:.1f} s"
            raise TransferTimeout(self._what + why)
        return left
