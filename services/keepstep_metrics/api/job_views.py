"""The current state of a job, as JSON. Times are Unix seconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from keepstep_metrics.history.findings import goodput
from keepstep_metrics.history.findings.alerts import Alert, alerts
from keepstep_metrics.history.findings.blame import Blame, blame
from keepstep_metrics.history.findings.pace import sparks, steps_per_second
from keepstep_metrics.history.group import Group
from keepstep_metrics.history.job import Job
from keepstep_metrics.history.timeseries.timeline import State
from keepstep_metrics.history.work import Work
from keepstep_metrics.lighthouse.live_status import Live, LiveCopies, StateOfJob


@dataclass(frozen=True, slots=True)
class JobSummary:
    job: str
    first_seen: float
    last_seen: float
    groups: int
    """Running groups."""
    step: int
    goodput: float | None
    """Over the last hour; None: the job had no groups."""
    steps_per_second: float | None
    pace: tuple[float, ...]
    """Steps per second in each of the last 60 minutes, the oldest first."""
    alerts: tuple[Alert, ...]


@dataclass(frozen=True, slots=True)
class JobsView:
    jobs: tuple[JobSummary, ...]


@dataclass(frozen=True, slots=True)
class HealNow:
    bytes_done: int
    bytes_total: int
    """0: unknown."""
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
    """Median of its last steps without a wait or a heal."""
    straggler: bool
    busy_seconds: float | None
    """Median of its own time per step, without waits for others; None: unknown."""
    heal: HealNow | None
    loss: float | None
    values: dict[str, float]
    """Last recorded values, ``loss`` included."""
    host: str
    """Empty: unknown."""
    restarts: int
    failed_heals: int
    """In a row."""
    error: str
    """Why it was lost or failed to heal the last time; empty: neither happened."""
    error_at: float
    """Unix time of ``error``."""
    copies: LiveCopies | None
    """None: each group has the whole model, it is no member, or the lighthouse did not answer."""


@dataclass(frozen=True, slots=True)
class NowView:
    job: str
    t: float
    """Time of the answer, by this service's clock."""
    step: int
    quorum_id: int
    epoch: int
    participants: tuple[str, ...]
    joining: tuple[str, ...]
    waiting_for: str | None
    """Why the next quorum waits, as a sentence; None: it does not wait, or the lighthouse did not answer."""
    hangs: tuple[str, ...]
    """Ranks that hold up the job for longer than usual, and in which line; each a sentence."""
    groups: tuple[GroupNow, ...]
    """Sorted by name, without groups that left gracefully."""
    steps_per_second: float | None
    loss: float | None
    """Mean of the last loss of each running group."""
    committed_at: float | None
    """When the last commit of any group was reported, by this service's clock."""
    needs: int | None
    """Groups that a quorum needs (``min_replicas``); None: the lighthouse did not answer."""
    blame: Blame | None
    """The group that the others wait for; None: no group is slow."""
    alerts: tuple[Alert, ...]
    state: StateOfJob | None
    """As the lighthouse sees the job; None: it did not answer."""
    kept_out: tuple[str, ...]
    """Names of banned and evicted groups, as ordered, and of groups on probation."""


def jobs_view(jobs: Iterable[Job], now: float) -> Work[JobsView]:
    """Return the summaries of all jobs, in pieces."""
    found = []
    for job in sorted(jobs, key=lambda one: one.name):
        one = yield from _summary(job, now)
        found.append(one)
    return JobsView(tuple(found))


def _summary(job: Job, now: float) -> Work[JobSummary]:
    alive = sum(one.is_there for one in job.groups.values())
    ratio = goodput.ratio((yield from goodput.summing(job, now - 3600, now)))
    pace = steps_per_second(job, now)
    found = (pace, sparks(job, now), alerts(job, now))
    return JobSummary(job.name, job.first_seen, job.last_seen, alive, job.step, ratio, *found)


def now_view(job: Job, live: Live, now: float) -> NowView:
    joining = {*job.joining, *live.joining}.difference(job.participants)
    losses = [one.values["loss"] for one in job.groups.values() if one.is_there and "loss" in one.values]
    committed_at = max((one.committed_at for one in job.groups.values()), default=0.0)
    return NowView(
        job=job.name,
        t=now,
        step=job.step,
        quorum_id=job.quorum_id,
        epoch=job.epoch,
        participants=tuple(sorted(job.participants)),
        joining=tuple(sorted(joining)),
        waiting_for=live.waiting_for,
        hangs=live.hangs,
        groups=tuple(
            _group_now(one, job, live) for _, one in sorted(job.groups.items()) if one.timeline.state is not State.GONE
        ),
        steps_per_second=steps_per_second(job, now),
        loss=sum(losses) / len(losses) if losses else None,
        committed_at=committed_at or None,
        needs=live.needs,
        blame=blame(job),
        alerts=alerts(job, now),
        state=live.state,
        kept_out=tuple(sorted({*live.kept_out, *(one.name for one in job.groups.values() if one.parted)})),
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
        busy_seconds=one.busy_p50,
        heal=None
        if heal is None
        else HealNow(
            heal.bytes_done, heal.bytes_total, heal.bytes_per_second, heal.seconds_left, heal.via, heal.source
        ),
        loss=one.values.get("loss"),
        values=dict(one.values),
        host=live.hosts.get(one.name, ""),
        restarts=one.restarts,
        failed_heals=one.failed_heals,
        error=one.error,
        error_at=one.error_at,
        copies=live.copies.get(one.name),
    )
