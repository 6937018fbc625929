"""A month of a metrics service: records of jobs that train once, and of one job through which groups come and go."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from keepstep_mesh.protocol.telemetry_records import (
    BatchHead,
    Record,
    StateRecord,
    StepRecord,
    pack_batch,
    pack_record,
    read_batch,
)
from keepstep_mesh.protocol.telemetry_records import EventRecord as Event
from keepstep_metrics.api import prometheus
from keepstep_metrics.app import FILE, Metrics
from keepstep_metrics.history.job import MAX_GROUPS
from keepstep_metrics.history.machine import KEPT_SECONDS, MAX_JOBS, MAX_SENDERS
from keepstep_metrics.settings import MetricsSettings
from keepstep_metrics.storage.event_store import Store
from tests.faults.month.figures import Figures, bytes_of, lines_of
from tests.faults.month.virtual_time import Clock

DAY = 86400.0
DAYS = 30
LONG = "long"
NAMES = 20
WRITE_SECONDS = 30.0
JUMPS = {10: 20 * DAY, 11: -20 * DAY}
"""Day -> how far the clock of the service is set; those of the senders stay right, and follow it as they measure it."""


class Sender:
    """Sends the records of one process, with its own clock, which never jumps."""

    def __init__(self, one: Metrics, clock: Clock, source: str, name: str, job: str = "") -> None:
        self._one, self._clock = one, clock
        self._head = {"source": source, "name": name, "job": job, "boot": uuid.uuid4().hex}
        self._begin = clock.unix - clock.monotonic
        self._first = 1

    @property
    def now(self) -> float:
        return self._begin + self._clock.monotonic

    async def send(self, *records: Record) -> None:
        offset = self._clock.unix - self.now
        head = BatchHead(**self._head, first=self._first, clock_offset=offset)  # type: ignore[arg-type]
        body = pack_batch(head, [pack_record(one) for one in records])
        self._first += len(records)
        self._one.take(read_batch(body), body)
        await self._one.store.written(WRITE_SECONDS)


async def train_once(one: Metrics, clock: Clock, told: Sender, job: str, replica_id: str, quorum_id: int) -> None:
    """Send the records of a group that trains two steps. One of ten dies, the others leave."""
    worker = Sender(one, clock, "worker", replica_id, job)
    t = told.now
    members = {"quorum_id": quorum_id, "members": [replica_id]}
    await told.send(
        Event(t=t, id=1, job=job, event="joined", replica_id=replica_id),
        Event(t=t, id=2, job=job, event="quorum", detail=members),
    )
    steps = (StepRecord(t=t + n, step=n, committed=True, seconds=1.0, values={"loss": 1.0 / n}) for n in (1, 2))
    await worker.send(StateRecord(t=t, state="training"), *steps)
    end = "lost" if quorum_id % 10 == 0 else "left"
    await told.send(Event(t=t + 3, id=3, job=job, event=end, replica_id=replica_id, detail={"reason": "it ended"}))


@asynccontextmanager
async def running(one: Metrics, folder: Path) -> AsyncIterator[None]:
    """Run the store of the service, without its polls, which would be most of the work."""
    one.store = await Store.open(folder / FILE)
    writer = asyncio.create_task(one.store.run())
    try:
        yield
    finally:
        writer.cancel()
        await asyncio.wait([writer])
        await one.store.close()


def tidy(one: Metrics) -> None:
    """Do each hour what the service does every 30 s."""
    one.core.forget_before(time.time() - KEPT_SECONDS)
    one.store.forget_events(time.time() - one.settings.keep_events)
    one.store.snapshot(one.core.dump())


async def month(clock: Clock, jobs: int, folder: Path) -> Figures:
    """Return what the metrics service held. Its clock jumps 20 days ahead on day 10, and back on day 11."""
    figures = Figures({"left_out": 0, "jobs": MAX_JOBS, "senders": MAX_SENDERS, "long_job_groups": MAX_GROUPS})
    one = Metrics(MetricsSettings(data_dir=folder))
    registry = prometheus.registry(one)
    async with running(one, folder):
        told = Sender(one, clock, "lighthouse", "lighthouse-0")
        for number in range(jobs):
            at = number * DAYS * DAY / jobs
            await asyncio.sleep(max(0.0, at - clock.monotonic))
            await train_once(one, clock, told, f"job-{number}", f"r0:{number:x}", number)
            name = f"v{number % NAMES}" if number % 2 else f"pod-{number}"
            await train_once(one, clock, told, LONG, f"{name}:{number:x}", number)
            if number % max(1, jobs // DAYS // 24) == 0:
                tidy(one)
            if number and number % (jobs // DAYS) == 0:
                day = round(at / DAY)
                clock.set_by(JUMPS.get(day, 0.0))
                long = one.core.jobs.get(LONG)
                recent = (
                    [] if long is None else list(long.highest.rings[-1].rows(clock.unix - DAY / 24, clock.unix + 1))
                )
                rows = await one.store._in_thread(
                    lambda: one.store._connection.execute("SELECT count(*) FROM events").fetchone()[0]
                )
                figures.add(
                    day,
                    left_out=one.core.left_out,
                    jobs=len(one.core.jobs),
                    senders=len(one.core._senders),
                    long_job_groups=0 if long is None else len(long.groups),
                    long_job_points_of_last_hour=len(recent),
                    stored_events=rows,
                    database_bytes=bytes_of(folder, "metrics.sqlite*"),
                    metric_lines=lines_of(registry),
                )
    return figures
