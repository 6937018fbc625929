"""Say which groups of a job are slower than the others. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep_metrics.history import stragglers
from keepstep_metrics.history.job import Job


@dataclass(frozen=True, slots=True)
class StragglerView:
    name: str
    seconds: float
    """What it needs itself for a step: median of its last ones."""
    score: float
    """MADs above the median over groups."""
    straggler: bool
    since: float | None
    steps: int
    """Committed since then."""


@dataclass(frozen=True, slots=True)
class StragglersView:
    job: str
    median_seconds: float | None
    """Over groups; None: fewer than three are compared."""
    mad_seconds: float | None
    groups: tuple[StragglerView, ...]
    """The slowest first."""


def stragglers_view(job: Job) -> StragglersView:
    found = stragglers.spread({name: one.seconds for name, one in job.standings.items()})
    groups = sorted(job.standings.items(), key=lambda one: -one[1].score)
    return StragglersView(
        job.name,
        found.median if found else None,
        found.mad if found else None,
        tuple(StragglerView(name, one.seconds, one.score, one.straggler, one.since, one.steps) for name, one in groups),
    )
