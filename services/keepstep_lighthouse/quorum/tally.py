"""Sums over all groups of a job, for metrics."""

from __future__ import annotations

from dataclasses import dataclass, field

from keepstep_mesh.telemetry.duration_counts import DurationCounts


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
    nonfinite: int = 0
    """Steps of groups that contributed a NaN or an infinity."""
