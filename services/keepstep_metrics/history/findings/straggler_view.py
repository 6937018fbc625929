"""Stragglers of a job, as JSON. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep_metrics.history import stragglers
from keepstep_metrics.history.job import Job


@dataclass(frozen=True, slots=True)
class StragglerView:
    name: str
    seconds: float
    """Median of its own time per step."""
    score: float
    """Distance from the median over groups, in MADs."""
    straggler: bool
    since: float | None
    steps: int
    """Committed steps since then."""


@dataclass(frozen=True, slots=True)
class StragglersView:
    job: str
    median_seconds: float | None
    """Over groups; None: fewer than three groups are compared."""
    mad_seconds: float | None
    groups: tuple[StragglerView, ...]
    """Slowest first."""


def stragglers_view(job: Job) -> StragglersView:
    found = stragglers.spread({name: one.seconds for name, one in job.standings.items()})
    groups = sorted(job.standings.items(), key=lambda one: -one[1].score)
    return StragglersView(
        job.name,
        found.median if found else None,
        found.mad if found else None,
        tuple(StragglerView(name, one.seconds, one.score, one.straggler, one.since, one.steps) for name, one in groups),
    )
