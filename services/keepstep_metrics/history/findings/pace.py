"""Steps per second of a job, now and over the last hour. Pure."""

from __future__ import annotations

from itertools import pairwise

from keepstep_metrics.history.job import Job

RECENT_SECONDS = 15.0
SLOW_SECONDS = 1800.0
"""A job whose steps take longer than this has no pace."""
LATE_SECONDS = 1.5
"""A step is reported up to this much later."""
SPARKS = 60
SPARK_SECONDS = 60.0


def steps_per_second(job: Job, now: float) -> float | None:
    """Return the steps per second of the last seconds, or of the last two steps of a slow job; None: unknown."""
    rows = [(t, cells[0]) for t, cells in job.highest.ring(now - 900, 0, now).rows(now - RECENT_SECONDS, now)]
    rows = [row for row in rows if row[1]]
    if len(rows) < 2:
        all_rows = [
            (t, cells[0]) for t, cells in job.highest.ring(now - SLOW_SECONDS, 0, now).rows(now - SLOW_SECONDS, now)
        ]
        rows = all_rows[-2:]
    if len(rows) < 2:
        return None
    (begin, first), (end, last) = rows[0], rows[-1]
    # A job that has stopped becomes slower with each moment without a step.
    seconds = max(end - begin, now - LATE_SECONDS - begin)
    return max(0.0, last - first) / seconds if seconds > 0 else None


def sparks(job: Job, now: float) -> tuple[float, ...]:
    """Return the steps per second in each of the last 60 minutes; the last minute is the one until ``now``."""
    begin = now - SPARKS * SPARK_SECONDS
    found = job.highest.points(begin, now, SPARK_SECONDS, now, max)
    steps: list[float] = []
    highest = min((cells[0] for cells in found.values()), default=0.0)
    for number in range(SPARKS):
        highest = found[number][0] if number in found else highest
        steps.append(highest)
    return (0.0, *(max(0.0, after - before) / SPARK_SECONDS for before, after in pairwise(steps)))
