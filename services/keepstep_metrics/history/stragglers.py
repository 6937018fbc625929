"""Which groups are slower than the others, by what they themselves need for a step. Pure.

All groups end a step together, so the time of a whole step tells nothing: what counts is the time until a group's last
collective began (``busy_seconds``). A group is scored by its distance from the median over groups in median absolute
deviations (MAD; Iglewicz and Hoaglin, "How to Detect and Handle Outliers", 1993). It has to be far away several times
in a row to become a straggler, and near again as often to be none any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

MIN_GROUPS = 3
"""Of two groups nobody can say which is the odd one."""
FAR, NEAR = 5.0, 3.0
"""Scores at which a group begins, and ceases, to be a straggler."""
FAR_SHARE = 1.2
"""It also has to need so many times the median: in a job whose groups are all alike a millisecond is many MADs."""
LEAST_MAD_SHARE = 0.02
"""Of the median, so that a MAD of 0 divides nothing."""
IN_A_ROW = 3


@dataclass(slots=True)
class Standing:
    """Of one group, from one judgement to the next."""

    straggler: bool = False
    since: float | None = None
    in_a_row: int = 0
    """Judgements that speak for a change."""
    seconds: float = 0.0
    score: float = 0.0
    steps: int = 0
    """Committed since it became one."""


@dataclass(frozen=True, slots=True)
class Spread:
    median: float
    mad: float


def spread(seconds: Mapping[str, float]) -> Spread | None:
    """None for too few groups."""
    if len(seconds) < MIN_GROUPS:
        return None
    middle = median(seconds.values())
    return Spread(middle, median(abs(one - middle) for one in seconds.values()))


def judge(standings: dict[str, Standing], seconds: Mapping[str, float], now: float) -> list[str]:
    """One judgement: takes the median seconds of each group, returns the names of those that became stragglers."""
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
            speaks_for_change = one.score < NEAR or own < found.median * FAR_SHARE
        else:
            speaks_for_change = one.score > FAR and own > found.median * FAR_SHARE
        one.in_a_row = one.in_a_row + 1 if speaks_for_change else 0
        if one.in_a_row >= IN_A_ROW:
            one.straggler, one.in_a_row, one.steps = not one.straggler, 0, 0
            one.since = now if one.straggler else None
            if one.straggler:
                new.append(name)
    return new
