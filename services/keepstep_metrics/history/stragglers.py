"""Find the groups that are slower than the others by their own time per step. Pure.

All groups end a step together, so the time of a whole step has no information. The measure is the time until a group's
last collective began (``busy_seconds``). The score of a group is its distance from the median over groups in median
absolute deviations (MAD; Iglewicz and Hoaglin, "How to Detect and Handle Outliers", 1993). A group becomes a straggler
after several high scores in a row, and ceases to be one after as many low scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

MIN_GROUPS = 3
"""Of two groups, none is the outlier."""
FAR, NEAR = 5.0, 3.0
"""Scores at which a group becomes, and ceases to be, a straggler."""
FAR_SHARE = 1.2
"""Least multiple of the median for a straggler: with very similar groups, a millisecond is many MADs."""
LEAST_MAD_SHARE = 0.02
"""Least MAD, as a share of the median; avoids a division by 0."""
IN_A_ROW = 3


@dataclass(slots=True)
class Standing:
    """Score of one group, kept from one judgement to the next."""

    straggler: bool = False
    since: float | None = None
    in_a_row: int = 0
    """Judgements in a row that contradict ``straggler``."""
    seconds: float = 0.0
    score: float = 0.0
    steps: int = 0
    """Committed steps since it became a straggler."""


@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    mad: float


def spread(seconds: Mapping[str, float]) -> Spread | None:
    """Return median and MAD over groups; None: too few groups."""
    if len(seconds) < MIN_GROUPS:
        return None
    middle = median(seconds.values())
    return Spread(middle, median(abs(one - middle) for one in seconds.values()))


def judge(standings: dict[str, Standing], seconds: Mapping[str, float], now: float) -> list[str]:
    """Update ``standings`` from the median seconds of each group. Return the names of new stragglers."""
    found = spread(seconds)
    new = []
    for name in list(standings):
        if name not in seconds or found is None:
            del standings[name]
    if found is None:
        return []
    unit = max(found.mad, LEAST_MAD_SHARE * found.median, 1e-6)
    for name, own in seconds.items():
        one = standings.setdefault(name, Standing())
        one.seconds, one.score = own, (own - found.median) / unit
        if one.straggler:
            contradicts = one.score < NEAR or own < found.median * FAR_SHARE
        else:
            contradicts = one.score > FAR and own > found.median * FAR_SHARE
        one.in_a_row = one.in_a_row + 1 if contradicts else 0
        if one.in_a_row >= IN_A_ROW:
            one.straggler, one.in_a_row, one.steps = not one.straggler, 0, 0
            one.since = now if one.straggler else None
            if one.straggler:
                new.append(name)
    return new
