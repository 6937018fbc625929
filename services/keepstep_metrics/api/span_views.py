"""A job over a span of time, as JSON. Times are Unix seconds."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from keepstep_metrics.history.events import Event
from keepstep_metrics.history.findings.blame import blame
from keepstep_metrics.history.findings.goodput import badput, ratio, shares, summing
from keepstep_metrics.history.findings.goodput import sentence as goodput_sentence
from keepstep_metrics.history.findings.marks import Mark, marks
from keepstep_metrics.history.histogram import BINS, quantile
from keepstep_metrics.history.job import Job
from keepstep_metrics.history.timeseries.timeline import merged
from keepstep_metrics.history.work import Work

MARK_PIXELS = 3
"""Marks that are closer together than this in a chart become one."""
MAX_OWN_COLUMNS = 8
"""A job of more groups has lines of single groups on request only: 1,000 columns are 10 MB."""
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class GroupTimeline:
    name: str
    spans: tuple[tuple[Any, ...], ...]
    """``[from, to, state]``, in order."""
    shares: dict[str, float]
    """Share of its time by state; the shares sum to one."""
    slow: tuple[tuple[float, float], ...]
    """``[from, to]``: when it was a straggler."""


@dataclass(frozen=True, slots=True)
class TimelineView:
    job: str
    since: float
    until: float
    groups: tuple[GroupTimeline, ...]


@dataclass(frozen=True, slots=True)
class StepsView:
    """Columns for charts, one entry per point."""

    job: str
    t: tuple[float, ...]
    """Begin of each point."""
    step: tuple[int | None, ...]
    committed_per_second: tuple[float, ...]
    """Steps that the job committed."""
    seconds: dict[str, tuple[float | None, ...]]
    """Mean seconds of committed steps, by group; see the parameter ``group``."""
    quantiles: dict[str, tuple[float | None, ...]]
    """Seconds of all groups' steps, within 5 %, by quantile."""
    values: dict[str, tuple[float | None, ...]]
    """Mean over groups, by recorded value."""
    group_values: dict[str, dict[str, tuple[float | None, ...]]]
    """The same for these groups, by recorded value and group."""
    marks: tuple[Mark, ...]
    """Failures, heals and quorum changes, for the charts."""


@dataclass(frozen=True, slots=True)
class GoodputView:
    job: str
    since: float
    until: float
    goodput: float | None
    """Share of group-seconds in committed steps; None: the job had no groups."""
    sentence: str
    """The goodput, and how much of the time the groups waited for slow ones; empty: the job had no groups."""
    shares: dict[str, float]
    seconds: dict[str, float]
    """Group-seconds by state."""
    badput: dict[str, float]
    """Group-seconds that were not good, by the names of ml-goodput-measurement (``BadputType``)."""
    steps_committed: int
    """Counted per group: a step of three groups counts three times."""
    steps_discarded: int
    failures: int
    mean_time_to_recover: float | None
    """Mean seconds from a failure to the next commit of any group."""
    mean_time_to_return: float | None
    """Mean seconds from a failure to the next commit of the failed group."""


def timeline(job: Job, since: float, until: float, points: int) -> Work[TimelineView]:
    """Return the view, in pieces."""
    groups = []
    for name, one in sorted(job.groups.items()):
        spans = one.timeline.spans(since, until)
        if not spans:
            continue
        seconds = one.timeline.seconds(since, until)
        pixels = tuple(
            (begin, end, state.value) for begin, end, state in merged(spans, (until - since) / max(points, 1))
        )
        slow = [(max(since, begin), until if end is None else min(until, end)) for begin, end in one.slow]
        visible = tuple((begin, end) for begin, end in slow if begin < end)
        groups.append(GroupTimeline(name, pixels, shares(seconds), visible))
        yield
    return TimelineView(job.name, since, until, tuple(groups))


def steps(
    job: Job,
    since: float,
    until: float,
    points: int,
    now: float,
    events: Iterable[Event] = (),
    names: Collection[str] = (),
) -> StepsView:
    """Return the columns.

    Args:
        events: Those to mark, in the order of their numbers.
        names: Groups that get columns of their own; empty: all groups, if they are at most ``MAX_OWN_COLUMNS``.
    """
    few = sorted(job.groups) if len(job.groups) <= MAX_OWN_COLUMNS else ()
    own = [name for name in names or few if name in job.groups]
    width = max((until - since) / max(points, 1), job.highest.ring(since, 0, now).width)
    count = max(1, -int(-(until - since) // width))
    groups = {name: job.groups[name].steps.points(since, until, width, now) for name in own}
    commits = job.commits.series.points(since, until, width, now)
    highest = job.highest.points(since, until, width, now, max)
    histogram = job.histogram.points(since, until, width, now)
    nothing = [0] * BINS
    return StepsView(
        job=job.name,
        t=tuple(since + point * width for point in range(count)),
        step=tuple(int(highest[point][0]) if point in highest else None for point in range(count)),
        committed_per_second=tuple(commits[point][0] / width if point in commits else 0.0 for point in range(count)),
        seconds={
            name: tuple(
                cells[2] / cells[0] if (cells := of_group.get(point)) is not None and cells[0] else None
                for point in range(count)
            )
            for name, of_group in groups.items()
            if of_group
        },
        quantiles={
            name: tuple(quantile(histogram.get(point, nothing), share) for point in range(count))
            for name, share in QUANTILES.items()
        },
        values={name: _means(one.points(since, until, width, now), count) for name, one in job.values.items()},
        group_values={
            name: {
                group: _means(job.group_values[name, group].points(since, until, width, now), count)
                for group in own
                if (name, group) in job.group_values
            }
            for name in job.values
        },
        marks=tuple(marks(events, since, until, (until - since) / max(points, 1) * MARK_PIXELS)),
    )


def _means(points: dict[int, Any], count: int) -> tuple[float | None, ...]:
    return tuple(points[point][0] / points[point][1] if point in points else None for point in range(count))


def goodput(job: Job, since: float, until: float) -> Work[GoodputView]:
    """Return the view, in pieces."""
    total = yield from summing(job, since, until)
    committed = discarded = 0
    for _, cells in job.steps.ring(since, 0, until).rows(since, until):
        committed, discarded = committed + int(cells[0]), discarded + int(cells[1])
    failures = [one for one in job.failures if since <= one.t < until]
    to_commit = [one.committed_at - one.t for one in failures if one.committed_at is not None]
    to_return = [one.recovered_at - one.t for one in failures if one.recovered_at is not None]
    return GoodputView(
        job=job.name,
        since=since,
        until=until,
        goodput=ratio(total),
        sentence=goodput_sentence(total, blame(job)),
        shares=shares(total),
        seconds={state.value: seconds for state, seconds in total.items()},
        badput=badput(total),
        steps_committed=committed,
        steps_discarded=discarded,
        failures=len(failures),
        mean_time_to_recover=sum(to_commit) / len(to_commit) if to_commit else None,
        mean_time_to_return=sum(to_return) / len(to_return) if to_return else None,
    )
