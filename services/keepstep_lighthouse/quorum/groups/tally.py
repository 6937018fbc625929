"""Sums and histograms over all groups of a job, for metrics."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from itertools import accumulate

BOUNDS_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of the buckets: from a quorum round to a long heal."""


class DurationCounts:
    """The number of durations in each bucket, and their sum."""

    __slots__ = ("_counts", "seconds")

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS_SECONDS) + 1)
        self.seconds = 0.0
        """Sum of all durations."""

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(BOUNDS_SECONDS, seconds)] += 1
        self.seconds += seconds

    @property
    def count(self) -> int:
        return sum(self._counts)

    @property
    def buckets(self) -> list[tuple[str, int]]:
        """Upper bound of each bucket, and the number of durations up to it; the last bound is ``+Inf``."""
        bounds = (*map(str, BOUNDS_SECONDS), "+Inf")
        return [*zip(bounds, accumulate(self._counts), strict=True)]


@dataclass(slots=True)
class Tally:
    """Sums over all groups since this lighthouse leads; times in seconds."""

    waits: DurationCounts = field(default_factory=DurationCounts)
    """From each request that was answered with a quorum to its answer."""
    committed: int = 0
    """Steps of groups, each from an answer to the next request."""
    discarded: int = 0
    retried: int = 0
    """Retries of steps by groups; the same step may be retried more than once."""
    steps: DurationCounts = field(default_factory=DurationCounts)
    """These steps."""
    failures: int = 0
    """Losses that ``presence.departures`` counts, and scripts that ended with an error."""
    nonfinite: int = 0
    """Steps of groups that contributed a NaN or an infinity."""
