"""Exponential backoff: the delay before the next attempt. Pure: the random draw is an argument."""

from __future__ import annotations

from dataclasses import dataclass

MAX_DOUBLINGS = 60


@dataclass(frozen=True, slots=True)
class Backoff:
    """``first`` seconds, doubled after each further failure, at most ``most`` seconds."""

    first: float
    most: float

    def seconds(self, failures: int, draw: float = 1.0) -> float:
        """Return the delay after ``failures`` failures in a row, at least 1.

        Args:
            failures: attempts that failed in a row.
            draw: a random number in [0, 1) spreads clients that failed together over the upper half of the delay; the
                default takes the whole delay.
        """
        delay = min(self.most, self.first * 2.0 ** min(failures - 1, MAX_DOUBLINGS))
        return delay * (0.5 + draw / 2)
