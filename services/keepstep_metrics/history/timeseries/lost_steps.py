"""Steps that were lost because the job went back: the time of their training is not good. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from keepstep_metrics.history.timeseries.series import Series
from keepstep_metrics.history.timeseries.timeline import State, Timeline


def reached_at(steps: Series, step: int, before: float) -> float | None:
    """Return when the job first went beyond ``step`` on its last way up before that time; None: unknown.

    Args:
        steps: the job's step over time.
        step: the step that the job went back to.
        before: Unix time.
    """
    earliest = None
    for ring in steps.rings:
        for t, (highest,) in reversed(list(ring.rows(0.0, before))):
            if highest <= step:
                return earliest
            earliest = t
    return earliest


def lose(timelines: Iterable[Timeline], since: float, until: float) -> None:
    """Count the time of training between the two times as that of discarded steps."""
    for timeline in timelines:
        for begin, end, state in timeline.spans(since, until):
            if state is State.TRAINING:
                timeline.fill(begin, end, State.RETRYING)
