"""Transfers, failures and events of a job, as JSON. Times are Unix seconds."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from keepstep_metrics.history.events import Event, number, reason_of
from keepstep_metrics.history.findings.incidents import fold
from keepstep_metrics.history.job import Job
from keepstep_metrics.history.transfers import Transfer
from keepstep_metrics.lighthouse.live_status import Live, LiveUpload


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
    """Open uploads, then the other transfers, newest first."""


@dataclass(frozen=True, slots=True)
class FailureView:
    t: float
    name: str
    cause: str
    recovered_at: float | None
    """When the failed group committed a step again."""
    seconds_to_commit: float | None
    """Until the next commit of any group."""
    seconds_to_return: float | None


@dataclass(frozen=True, slots=True)
class EndView:
    """Why a group ended, as its lighthouse judges (``incident``)."""

    t: float
    name: str
    host: str
    """Empty: unknown."""
    verdict: str
    reason: str
    """The evidence, sentences with semicolons between."""


@dataclass(frozen=True, slots=True)
class FailuresView:
    job: str
    failures: tuple[FailureView, ...]
    """Newest first."""
    ends: tuple[EndView, ...]
    """Of the last day, newest first; also those that count as no failure, such as a preemption."""


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


@dataclass(frozen=True, slots=True)
class IncidentPart:
    id: int
    t: float
    event: str
    name: str
    sentence: str


@dataclass(frozen=True, slots=True)
class IncidentView:
    """Events that belong together, such as a death and the return after it."""

    id: int
    t: float
    until: float
    kind: str
    """Kind of the event that says most."""
    name: str
    sentence: str
    away: bool
    """The group was lost and has not come back."""
    events: tuple[IncidentPart, ...]


@dataclass(frozen=True, slots=True)
class IncidentsView:
    job: str
    incidents: tuple[IncidentView, ...]
    """Newest first."""


def incidents(job: str, events: Iterable[Event]) -> IncidentsView:
    return IncidentsView(
        job,
        tuple(
            IncidentView(
                one.id,
                one.t,
                one.until,
                one.kind,
                one.name,
                one.sentence,
                one.away,
                tuple(IncidentPart(part.id, part.t, part.event, part.name, part.sentence) for part in one.events),
            )
            for one in reversed(fold(events))
        ),
    )


def transfers(job: Job, live: Live) -> TransfersView:
    known = [_transfer(one, live) for one in [*job.transfers][::-1]]
    return TransfersView(job.name, (*map(_upload, live.uploads), *known))


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
    newest = now or one
    return TransferView(
        kind=one.kind,
        name=one.name,
        step=one.step,
        bytes_done=newest.bytes_done,
        bytes_total=newest.bytes_total,
        bytes_per_second=newest.bytes_per_second,
        seconds_left=newest.seconds_left,
        via=newest.via or one.via,
        source=newest.source or one.source,
        began=one.began,
        ended=one.ended,
        error=one.error,
    )


def failures(job: Job, limit: int, ends: Iterable[Event] = ()) -> FailuresView:
    """``ends``: events ``incident``, oldest first. A later one replaces one of the same end."""
    latest = {(one.name, number(one.detail.get("at"))): one for one in ends}
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
        tuple(
            EndView(t, name, str(one.detail.get("host", "")), str(one.detail.get("verdict", "")), reason_of(one.detail))
            for (name, t), one in sorted(latest.items(), key=lambda item: -item[0][1])[:limit]
            if one.detail.get("verdict") != "ordered"  # it turned out to be no incident
        ),
    )


def event_view(event: Event) -> EventView:
    return EventView(event.id, event.t, event.event, event.name, event.sentence, event.detail)
