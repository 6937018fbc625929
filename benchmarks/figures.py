"""Define the result of a benchmark: figures and their limits.

A figure holds every sample of both sides: keepstep, and what is measured beside it. Its value is one statistic of them.
It is reached when the value is within a limit: a number, or a multiple of the other side's value of the same run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


def p50(samples: Sequence[float]) -> float:
    return statistics.median(samples)


def _nearest_rank(samples: Sequence[float], share: float) -> float:
    """Return the smallest sample that at least this share of all samples do not exceed."""
    ordered = sorted(samples)
    return ordered[math.ceil(share * len(ordered)) - 1]


def p95(samples: Sequence[float]) -> float:
    return _nearest_rank(samples, 0.95)


def p99(samples: Sequence[float]) -> float:
    return _nearest_rank(samples, 0.99)


def mean(samples: Sequence[float]) -> float:
    return statistics.fmean(samples)


STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {
    "p50": p50,
    "p95": p95,
    "p99": p99,
    "max": max,
    "mean": mean,
}


@dataclass(frozen=True)
class Limit:
    """The largest value allowed (the smallest, if more is better); if both parts are given, both must hold."""

    value: float | None = None
    """In the figure's unit."""
    times_theirs: float | None = None
    """Multiple of the other side's value in this run."""


@dataclass(frozen=True)
class Figure:
    name: str
    unit: str
    statistic: str
    """One of ``STATISTICS``."""
    ours: Sequence[float] = ()
    theirs: Sequence[float] = ()
    limit: Limit | None = None
    more_is_better: bool = False
    must: bool = False
    """Whether the run has failed if the limit is not reached."""
    beside: str = "torchft"
    """Name of the other side, in tables."""
    definition: str = ""
    also: dict[str, object] = field(default_factory=dict)
    """Further values of the same run, for the JSON."""

    def value(self, samples: Sequence[float]) -> float | None:
        return STATISTICS[self.statistic](samples) if samples else None

    def ratio(self) -> float | None:
        """keepstep's value divided by the other side's."""
        ours, theirs = self.value(self.ours), self.value(self.theirs)
        return ours / theirs if ours is not None and theirs else None

    def bounds(self) -> list[float]:
        if self.limit is None:
            return []
        bounds = [] if self.limit.value is None else [self.limit.value]
        theirs = self.value(self.theirs)
        if self.limit.times_theirs is not None and theirs is not None:
            bounds.append(self.limit.times_theirs * theirs)
        return bounds

    def reached(self) -> bool | None:
        """Whether the limit is reached; None without a limit or without a value to compare."""
        ours, bounds = self.value(self.ours), self.bounds()
        if ours is None or not bounds:
            return None
        return ours >= max(bounds) if self.more_is_better else ours <= min(bounds)

    def record(self) -> dict[str, object]:
        return {
            "name": self.name,
            "unit": self.unit,
            "statistic": self.statistic,
            "definition": self.definition,
            "keepstep": self.value(self.ours),
            "other": self.value(self.theirs),
            "beside": self.beside,
            "ratio": self.ratio(),
            "limits": self.bounds(),
            "more_is_better": self.more_is_better,
            "reached": self.reached(),
            "samples": {"keepstep": list(self.ours), "other": list(self.theirs)},
            **self.also,
        }
