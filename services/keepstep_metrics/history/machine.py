"""All jobs that the metrics service knows: batches of records in, the state of each job out.

Rules:

* No clock and no I/O. Each batch is applied with the time of its arrival, so that a replay of the same batches in the
  same order gives the same state.
* A record counts once: records are numbered by their sender, and ``MetricsCore`` keeps the last number of each sender.
* Events get their numbers here.
* Everything is bounded. ``dump`` and ``load`` carry all of it over a restart.
* If the clock of the service is set back, what was recorded for later times is forgotten.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import asdict, replace
from typing import Any

from keepstep_mesh.protocol.telemetry_records import (
    Batch,
    BatchHead,
    DurableRecord,
    EventRecord,
    StateRecord,
    StepRecord,
    UploadRecord,
)
from keepstep_metrics.history.events import JOB_DELETED, MAX_INTEGER, Event
from keepstep_metrics.history.job import Job
from keepstep_metrics.history.work import Work, whole

MAX_JOBS = 100
MAX_SENDERS = 20_000
MAX_AHEAD_SECONDS = 60.0
"""A record from further in the future comes from a wrong clock and is left out."""
KEPT_SECONDS = 86400.0
IDLE_JOB_SECONDS = 3600.0
"""A job without records for this time makes room for a new one; an ended job does so at once."""
MAX_DELETED = 1000
"""Deleted jobs that are remembered."""


class MetricsCore:
    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.now = 0.0
        """Time of the last batch."""
        self.last_event = 0
        """Number of the last event."""
        self.deleted: OrderedDict[str, Event] = OrderedDict()
        """By job, the event of its deletion. Older records of the job are left out."""
        self._senders: dict[tuple[str, str], int] = {}
        """(name, boot) -> number of its last record; the sender heard last stands last."""
        self.dropped: dict[tuple[str, str], int] = {}
        """(name, boot) -> records that the sender dropped."""
        self.dropped_total = 0
        self.left_out = 0
        """Records beyond the limits of jobs and groups, from the future, or older than the job's deletion."""

    def apply(self, batch: Batch, now: float) -> tuple[int, list[tuple[str, Event]]]:
        """Return how many records were new, and the new events, each with its job."""
        if now < self.now - MAX_AHEAD_SECONDS:
            self._clock_set_back(now)
        self.now = now
        head = batch.head
        seen = self._note_sender(head, len(batch.records))
        events: list[tuple[str, Event]] = []
        new = batch.records[max(0, seen + 1 - head.first) :]
        for record in new:
            if record is None:
                continue
            if head.clock_offset and not isinstance(record, UploadRecord):  # an upload is known by its times
                record = replace(record, t=record.t + head.clock_offset)  # noqa: PLW2901
            name = record.job if isinstance(record, EventRecord | UploadRecord) else head.job
            job = self._job(name, now) if name and self._counts(name, record.t, now) else None
            if job is None or (head.source == "worker" and job.group(head.name) is None):
                self.left_out += 1
                continue
            job.last_seen = max(job.last_seen, now)
            job.changes += 1
            match record:
                case StepRecord():
                    job.add_step(head.name, record, now)
                case StateRecord():
                    job.set_state(head.name, record)
                case DurableRecord():
                    job.add_durable(record)
                case EventRecord():
                    self.last_event += 1
                    event = job.add_event(record, self.last_event)
                    events.append((name, event))
                    if record.event == JOB_DELETED:
                        self._delete(name, event)
                case UploadRecord():
                    job.transfers.update_upload(head.name, record)
        if (job := self.jobs.get(head.job)) is not None:
            for straggler in job.judge(now):
                self.last_event += 1
                events.append((job.name, job.add_straggler_event(straggler, now, self.last_event)))
        return len(new), events

    def _clock_set_back(self, now: float) -> None:
        for job in self.jobs.values():
            job.forget_after(now)
        for name, event in self.deleted.items():
            self.deleted[name] = replace(event, t=min(event.t, now))

    def _note_sender(self, head: BatchHead, records: int) -> int:
        """Return the number of the last record before this batch."""
        key = head.name, head.boot
        seen = self._senders.pop(key, 0)
        self._senders[key] = max(seen, head.first + records - 1)
        newly_dropped = max(0, head.dropped - self.dropped.get(key, 0))
        self.dropped_total = min(self.dropped_total + newly_dropped, MAX_INTEGER)
        self.dropped[key] = head.dropped
        while len(self._senders) > MAX_SENDERS:
            oldest = next(iter(self._senders))
            del self._senders[oldest]
            self.dropped.pop(oldest, None)
        return seen

    def _counts(self, job: str, t: float, now: float) -> bool:
        deleted = self.deleted.get(job)
        return t <= now + MAX_AHEAD_SECONDS and (deleted is None or t > deleted.t)

    def _delete(self, job: str, event: Event) -> None:
        del self.jobs[job]
        self.deleted[job] = event
        self.deleted.move_to_end(job)
        while len(self.deleted) > MAX_DELETED:
            self.deleted.popitem(last=False)

    def _job(self, name: str, now: float) -> Job | None:
        """Return the job, a new one if need be; None: every other job is in use."""
        if (job := self.jobs.get(name)) is None:
            if len(self.jobs) >= MAX_JOBS:
                by_last_record = sorted(self.jobs.values(), key=lambda one: one.last_seen)
                replaced = next((one for one in by_last_record if not one.has_groups), by_last_record[0])
                if replaced.has_groups and now - replaced.last_seen < IDLE_JOB_SECONDS:
                    return None
                del self.jobs[replaced.name]
            job = self.jobs[name] = Job(name, now)
        return job

    def forget_before(self, t: float) -> None:
        """Forget jobs without a record since ``t``, and what ended before ``t`` in the others."""
        for job in [*self.jobs.values()]:
            if job.last_seen < t:
                del self.jobs[job.name]
            else:
                job.forget_before(t)

    # ---- over a restart

    def dump(self) -> dict[str, Any]:
        return whole(self.dumping())

    def dumping(self) -> Work[dict[str, Any]]:
        """Make a dump in pieces. Apply no batch between them."""
        jobs = []
        for job in self.jobs.values():
            dumped = yield from job.dumping()
            jobs.append(dumped)
        return {
            "jobs": jobs,
            "last_event": self.last_event,
            "now": self.now,
            "deleted": [[name, asdict(event)] for name, event in self.deleted.items()],
            "senders": [[*key, last, self.dropped.get(key, 0)] for key, last in self._senders.items()],
            "dropped_total": self.dropped_total,
        }

    def load(self, dumped: dict[str, Any]) -> None:
        for one in dumped["jobs"]:
            job = Job.load(one)
            self.jobs[job.name] = job
        self.now = dumped.get("now", 0.0)
        self.last_event, self.dropped_total = dumped["last_event"], dumped["dropped_total"]
        self.deleted.update((name, Event(**event)) for name, event in dumped.get("deleted", []))
        for name, boot, last, dropped in dumped["senders"]:
            self._senders[name, boot] = last
            self.dropped[name, boot] = dropped
