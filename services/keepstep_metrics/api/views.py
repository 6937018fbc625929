"""What the metrics service answers, as JSON, and how it is made of the core. Times are Unix seconds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from keepstep_metrics.history.histogram import BINS, quantile
from keepstep_metrics.history.machine import Group, Job, Transfer
from keepstep_metrics.history.timeline import LIVING, State, merged
from keepstep_metrics.lighthouse.live_status import Live, LiveUpload

QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class JobSummary:
    job: str
    first_seen: float
    last_seen: float
    groups: int
    """Alive now."""
    step: int
    goodput: float | None
    """Of the last hour; None: there was no group."""


@dataclass(frozen=True, slots=True)
class JobsView:
    jobs: tuple[JobSummary, ...]


@dataclass(frozen=True, slots=True)
class HealNow:
    bytes_done: int
    bytes_total: int
    """0: not known yet."""
    bytes_per_second: float
    seconds_left: float | None
    via: str
    source: str


@dataclass(frozen=True, slots=True)
class GroupNow:
    name: str
    replica_id: str
    state: str
    since: float
    step: int
    step_seconds_p50: float | None
    """Of its last steps that waited for nobody."""
    straggler: bool
    heal: HealNow | None
    loss: float | None
    values: dict[str, float]
    """All that its script recorded last; ``loss`` is one of them."""


@dataclass(frozen=True, slots=True)
class NowView:
    job: str
    t: float
    """This service's clock when it answers."""
    step: int
    quorum_id: int
    epoch: int
    participants: tuple[str, ...]
    joining: tuple[str, ...]
    waiting_for: str | None
    """What the next quorum waits for, as a sentence; None: nobody waits, or the lighthouse does not say."""
    groups: tuple[GroupNow, ...]
    """Sorted by name; those that left on purpose are not among them."""


@dataclass(frozen=True, slots=True)
class GroupTimeline:
    name: str
    spans: tuple[tuple[Any, ...], ...]
    """``[from, to, state]``, in order."""
    shares: dict[str, float]
    """Of its life in this time, by state; they sum to one."""


@dataclass(frozen=True, slots=True)
class TimelineView:
    job: str
    since: float
    until: float
    groups: tuple[GroupTimeline, ...]


@dataclass(frozen=True, slots=True)
class StepsView:
    """Columns, one entry a point: what a chart takes."""

    job: str
    t: tuple[float, ...]
    """Where each point begins."""
    step: tuple[int | None, ...]
    committed_per_second: tuple[float, ...]
    """By the job: commits of the group that committed most."""
    seconds: dict[str, tuple[float | None, ...]]
    """Mean seconds of the committed steps of each group."""
    quantiles: dict[str, tuple[float | None, ...]]
    """Over the steps of all groups, to a tenth."""
    values: dict[str, tuple[float | None, ...]]
    """Mean over groups of what scripts recorded."""


@dataclass(frozen=True, slots=True)
class GoodputView:
    job: str
    since: float
    until: float
    goodput: float | None
    """Share of group-seconds in steps that committed; None: there was no group."""
    shares: dict[str, float]
    seconds: dict[str, float]
    """Group-seconds by state."""
    steps_committed: int
    """By groups: a step that three groups committed counts three times."""
    steps_discarded: int
    failures: int
    mean_time_to_recover: float | None
    """Seconds from a loss to the next commit of the job."""
    mean_time_to_return: float | None
    """Seconds from a loss to the next commit of the group itself."""


@dataclass(frozen=True, slots=True)
class TransferView:
    kind: str
    name: str
    step: int
    bytes_done: int
    bytes_total: int
    bytes_per_second: float
    seconds_left: float | None
    via: str
    source: str
    began: float
    ended: float | None
    error: str


@dataclass(frozen=True, slots=True)
class TransfersView:
    job: str
    transfers: tuple[TransferView, ...]
    """Uploads under way, then the newest first."""


@dataclass(frozen=True, slots=True)
class FailureView:
    t: float
    name: str
    cause: str
    recovered_at: float | None
    """When the group itself committed a step again."""
    seconds_to_commit: float | None
    """Until any group committed a step without it."""
    seconds_to_return: float | None


@dataclass(frozen=True, slots=True)
class FailuresView:
    job: str
    failures: tuple[FailureView, ...]
    """The newest first."""


@dataclass(frozen=True, slots=True)
class EventView:
    id: int
    t: float
    event: str
    name: str
    sentence: str
    detail: dict[str, Any]


@dataclass(frozen=True, slots=True)
class EventsView:
    job: str
    events: tuple[EventView, ...]
    """Oldest first."""


def summary(job: Job, now: float) -> JobSummary:
    alive = sum(one.timeline.state not in (State.LOST, State.GONE) for one in job.groups.values())
    ratio = goodput_ratio(group_seconds(job, now - 3600, now))
    return JobSummary(job.name, job.first_seen, job.last_seen, alive, job.step, ratio)


def now_view(job: Job, live: Live, now: float) -> NowView:
    joining = {*job.joining, *live.joining}.difference(job.participants)
    return NowView(
        job=job.name,
        t=now,
        step=job.step,
        quorum_id=job.quorum_id,
        epoch=job.epoch,
        participants=tuple(sorted(job.participants)),
        joining=tuple(sorted(joining)),
        waiting_for=live.waiting_for,
        groups=tuple(
            _group_now(one, job, live) for _, one in sorted(job.groups.items()) if one.timeline.state is not State.GONE
        ),
    )


def _group_now(one: Group, job: Job, live: Live) -> GroupNow:
    standing, heal = job.standings.get(one.name), live.heals.get(one.name)
    return GroupNow(
        name=one.name,
        replica_id=one.replica_id,
        state=one.timeline.state.value,
        since=one.timeline.since,
        step=one.step,
        step_seconds_p50=one.seconds_p50,
        straggler=standing is not None and standing.straggler,
        heal=None
        if heal is None
        else HealNow(
            heal.bytes_done, heal.bytes_total, heal.bytes_per_second, heal.seconds_left, heal.via, heal.source
        ),
        loss=one.values.get("loss"),
        values=dict(one.values),
    )


def timeline(job: Job, since: float, until: float, points: int) -> TimelineView:
    groups = []
    for name, one in sorted(job.groups.items()):
        spans = one.timeline.spans(since, until)
        if not spans:
            continue
        seconds = one.timeline.seconds(since, until)
        pixels = tuple(
            (begin, end, state.value) for begin, end, state in merged(spans, (until - since) / max(points, 1))
        )
        groups.append(GroupTimeline(name, pixels, _shares(seconds)))
    return TimelineView(job.name, since, until, tuple(groups))


def _shares(seconds: dict[State, float]) -> dict[str, float]:
    total = sum(seconds.values()) or 1.0
    return {state.value: seconds[state] / total for state in LIVING}


def steps(job: Job, since: float, until: float, points: int, now: float) -> StepsView:
    width = max((until - since) / max(points, 1), job.highest.ring(since, 0, now).width)
    count = max(1, -int(-(until - since) // width))
    groups = {name: one.steps.points(since, until, width, now) for name, one in sorted(job.groups.items())}
    highest = job.highest.points(since, until, width, now, max)
    histogram = job.histogram.points(since, until, width, now)
    nothing = [0] * BINS
    most: Counter[int] = Counter()
    for of_group in groups.values():
        for point, cells in of_group.items():
            most[point] = max(most[point], int(cells[0]))
    return StepsView(
        job=job.name,
        t=tuple(since + point * width for point in range(count)),
        step=tuple(int(highest[point][0]) if point in highest else None for point in range(count)),
        committed_per_second=tuple(most[point] / width for point in range(count)),
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
    )


def _means(points: dict[int, Any], count: int) -> tuple[float | None, ...]:
    return tuple(points[point][0] / points[point][1] if point in points else None for point in range(count))


def group_seconds(job: Job, since: float, until: float) -> dict[State, float]:
    """By state."""
    total = dict.fromkeys(LIVING, 0.0)
    for one in job.groups.values():
        for state, seconds in one.timeline.seconds(since, until).items():
            total[state] += seconds
    return total


def goodput_ratio(seconds: dict[State, float]) -> float | None:
    """Of group-seconds by state; None: there was no group."""
    life = sum(seconds.values())
    return seconds[State.TRAINING] / life if life else None


def goodput(job: Job, since: float, until: float) -> GoodputView:
    total = group_seconds(job, since, until)
    committed = discarded = 0
    for one in job.groups.values():
        for _, cells in one.steps.ring(since, 0, until).rows(since, until):
            committed, discarded = committed + int(cells[0]), discarded + int(cells[1])
    failures = [one for one in job.failures if since <= one.t < until]
    to_commit = [one.committed_at - one.t for one in failures if one.committed_at is not None]
    to_return = [one.recovered_at - one.t for one in failures if one.recovered_at is not None]
    return GoodputView(
        job=job.name,
        since=since,
        until=until,
        goodput=goodput_ratio(total),
        shares=_shares(total),
        seconds={state.value: seconds for state, seconds in total.items()},
        steps_committed=committed,
        steps_discarded=discarded,
        failures=len(failures),
        mean_time_to_recover=sum(to_commit) / len(to_commit) if to_commit else None,
        mean_time_to_return=sum(to_return) / len(to_return) if to_return else None,
    )


def transfers(job: Job, live: Live) -> TransfersView:
    told = [_transfer(one, live) for one in reversed(job.transfers)]
    return TransfersView(job.name, (*map(_upload, live.uploads), *told))


def _upload(one: LiveUpload) -> TransferView:
    return TransferView(
        kind="upload",
        name=one.name,
        step=one.step,
        bytes_done=one.bytes_done,
        bytes_total=one.bytes_total,
        bytes_per_second=one.bytes_per_second,
        seconds_left=one.seconds_left,
        via=one.relay,
        source="",
        began=one.began,
        ended=None,
        error="",
    )


def _transfer(one: Transfer, live: Live) -> TransferView:
    now = live.heals.get(one.name) if one.kind == "heal" and one.ended is None else None
    told = now or one
    return TransferView(
        kind=one.kind,
        name=one.name,
        step=one.step,
        bytes_done=told.bytes_done,
        bytes_total=told.bytes_total,
        bytes_per_second=told.bytes_per_second,
        seconds_left=told.seconds_left,
        via=told.via or one.via,
        source=told.source or one.source,
        began=one.began,
        ended=one.ended,
        error=one.error,
    )


def failures(job: Job, limit: int) -> FailuresView:
    newest = [*job.failures][::-1][:limit]
    return FailuresView(
        job.name,
        tuple(
            FailureView(
                one.t,
                one.name,
                one.cause,
                one.recovered_at,
                None if one.committed_at is None else one.committed_at - one.t,
                None if one.recovered_at is None else one.recovered_at - one.t,
            )
            for one in newest
        ),
    )
