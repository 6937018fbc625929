"""The current state of a job, as JSON. Times are Unix seconds."""

from __future__ import annotations

from dataclasses import dataclass

from keepstep_metrics.history import goodput
from keepstep_metrics.history.group import Group
from keepstep_metrics.history.job import Job
from keepstep_metrics.history.timeline import State
from keepstep_metrics.lighthouse.live_status import Live


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
    heal: HealNow | None
    loss: float | None
    values: dict[str, float]
    """Last recorded values, ``loss`` included."""


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
    groups: tuple[GroupNow, ...]
    """Sorted by name, without groups that left gracefully."""


def summary(job: Job, now: float) -> JobSummary:
    alive = sum(one.is_there for one in job.groups.values())
    ratio = goodput.ratio(goodput.group_seconds(job, now - 3600, now))
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
