"""A histogram of step times with logarithmic bins. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import log2

BINS_PER_DOUBLING = 8
LOWEST_BIN_SECONDS = 0.001
BINS = 168
"""From 1 ms to 17 minutes; each bin is about a tenth wider than the one before."""


def bin_of(seconds: float) -> int:
    if seconds <= LOWEST_BIN_SECONDS:
        return 0
    return min(BINS - 1, int(BINS_PER_DOUBLING * log2(seconds / LOWEST_BIN_SECONDS)) + 1)


def quantile(histogram: Sequence[int], share: float) -> float | None:
    """Return the quantile ``share`` in seconds, within 5 %; None: the histogram is empty."""
    total = sum(histogram)
    if not total:
        return None
    counted = accumulate(histogram)
    number = next(number for number, count in enumerate(counted) if count >= share * total)
    if number == 0:
        return LOWEST_BIN_SECONDS
    return float(LOWEST_BIN_SECONDS * 2 ** ((number - 0.5) / BINS_PER_DOUBLING))
