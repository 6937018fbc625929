"""The end of jobs: an operator deletes one, or it was unused for its ``job_ttl``.

The duties of a deletion, in order: make the job inactive; wait for its last write; delete its record from the store
under the term, and in the same transaction raise the quorum_id of new jobs above that of this job; log it; end its
sessions; drop its data in memory. A deletion that fails, or whose outcome is unknown, ends the term, as any write
does.

A quorum_id is never used twice. So a group of the deleted job that reconnects later has a lineage below every
quorum_id of the next job of that name, and its last answer is outdated.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from typing import Protocol, TypeVar

from keepstep_lighthouse.jobs import records
from keepstep_lighthouse.jobs.event_log import EventLog, Happened
from keepstep_lighthouse.jobs.expiry import JobUse, expired, next_due, replaceable
from keepstep_lighthouse.jobs.job import Job
from keepstep_lighthouse.leadership.term import Term, TermOverError
from keepstep_lighthouse.quorum.views.replicas import ReplicaState
from keepstep_lighthouse.store.contract import Compare, Write
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.protocol import codec
from keepstep_mesh.protocol.membership import Data
from keepstep_mesh.protocol.messages import Evicted
from keepstep_mesh.protocol.names import name_of

EXPIRY_CHECK_SECONDS = 60.0
"""Longest pause between two searches for expired jobs."""
PAUSE_SECONDS = 0.1
"""Shortest pause between two searches."""
MAX_EVICTED = 10_000
"""Number of incarnations remembered that were evicted with their job; the oldest are dropped."""
BY_TTL = "job_ttl"
BY_LIMIT = "max_jobs"

log = get_logger("keepstep.lighthouse")


T = TypeVar("T")


class JobOwner(Protocol):
    """The lighthouse that holds the jobs."""

    jobs: dict[str, Job]
    events: EventLog
    term: Term | None

    def owned(self, task: asyncio.Task[T]) -> asyncio.Task[T]: ...

    def term_failed(self, term: Term, reason: str) -> None: ...


class JobEndings:
    def __init__(self, owner: JobOwner) -> None:
        self.floor = 0
        """quorum_id of new jobs."""
        self._stored_floor: bytes | None = None
        self._owner = owner
        self._evicted: OrderedDict[tuple[str, str], None] = OrderedDict()
        """(job, replica_id) of groups that were connected when their job was deleted by force."""
        self._one_deletion, self._one_room = asyncio.Lock(), asyncio.Lock()
        self._wake = asyncio.Event()

    def term_begins(self, stored_floor: bytes | None) -> None:
        """Read the lowest quorum_id of new jobs. Raises ``StoreError``."""
        self.floor, self._stored_floor = records.parse_floor(stored_floor), stored_floor

    def refusal(self, job: str, replica_id: str) -> str | None:
        """Return why this incarnation may not create the job again; None: it may."""
        if (job, replica_id) in self._evicted:
            return f"job {job!r} was deleted, and {replica_id} evicted with it; a new incarnation may come"
        return None

    # ---- deletion

    async def delete(self, job: Job, by: str, **detail: Data) -> Happened:
        """Delete ``job``; groups that are connected, or may reconnect, are evicted. Return the entry of the event log.

        Raises ``TermOverError``: whether it is deleted is not known.
        """
        evicted = [one.replica_id for one in job.core.replicas(time.monotonic()) if one.state is not ReplicaState.GONE]
        job.close()
        task = asyncio.create_task(self._delete(job, {"by": by, **detail}, sorted(evicted)))
        return await asyncio.shield(self._owner.owned(task))

    async def _delete(self, job: Job, detail: dict[str, Data], evicted: list[str]) -> Happened:
        owner, key = self._owner, records.JOB_PREFIX + job.name
        async with self._one_deletion:
            if writing := job.writing():
                await asyncio.wait(writing)
            quorum_id = job.core.record.quorum_id
            floor = max(self.floor, quorum_id + 1)
            value = b"%d" % floor
            compare = Compare(key, job.stored), Compare(records.FLOOR_KEY, self._stored_floor)
            try:
                await job.term.change(compare, (Write(key, None), Write(records.FLOOR_KEY, value)))
            except TermOverError as error:
                owner.term_failed(job.term, str(error))
                raise
            self.floor, self._stored_floor = floor, value
        if owner.jobs.get(job.name) is job:
            del owner.jobs[job.name]
        detail |= {"quorum_id": quorum_id, "evicted": list[Data](evicted)}
        happened = owner.events.add(job.name, "job_deleted", "", detail, time.time())
        owner.events.forget(job.name)
        log.info("job_deleted", job=job.name, **detail)
        self._evict(job, evicted, str(detail["by"]))
        return happened

    def _evict(self, job: Job, evicted: list[str], by: str) -> None:
        for replica_id in evicted:
            if name_of(replica_id) != replica_id:  # else its next process has the same
                self._evicted[job.name, replica_id] = None
        while len(self._evicted) > MAX_EVICTED:
            self._evicted.popitem(last=False)
        reason = f"job {job.name} was deleted by {by}"
        frame = codec.encode(Evicted(reason, 0.0))
        for session in job.sessions.values():
            session.send(frame)
            session.end(reason)

    # ---- expiry

    def wake(self) -> None:
        """Search for expired jobs again: one may expire sooner than computed."""
        self._wake.set()

    async def run(self) -> None:
        """Delete jobs as they expire, until cancelled."""
        while True:
            self._wake.clear()
            pause = next_due(self._uses()) - time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(max(pause, PAUSE_SECONDS), EXPIRY_CHECK_SECONDS)):
                    await self._wake.wait()
            try:
                await self.expire()
            except TermOverError as error:
                log.warning("expired jobs are not deleted", reason=str(error))
            except Exception:
                log.exception("fault in the expiry of jobs")  # this task must not end: without it, jobs never expire
                await asyncio.sleep(EXPIRY_CHECK_SECONDS)

    async def expire(self) -> None:
        """Delete the jobs that have expired, the longest unused first. Raises ``TermOverError``."""
        now = time.monotonic()
        for name in expired(self._uses(), now):
            job = self._owner.jobs.get(name)
            if job is not None and expired((job.use,), now):  # not used since, during the deletions before
                await self._delete_unused(name, BY_TTL)

    async def make_room(self, new: str, most: int) -> None:
        """Delete a job, so that ``new`` has a place among at most ``most`` jobs; not if it has one already.

        Raises ``TermOverError``.
        """
        async with self._one_room:  # the groups of a job come at the same time, and need one place
            jobs = self._owner.jobs
            if new not in jobs and len(jobs) >= most and (name := replaceable(self._uses(), time.monotonic())):
                await self._delete_unused(name, BY_LIMIT)

    async def _delete_unused(self, name: str, by: str) -> None:
        job, now = self._owner.jobs[name], time.monotonic()
        await self.delete(job, by, job_ttl=job.core.record.policy.job_ttl, idle_seconds=now - job.used_at)

    def _uses(self) -> list[JobUse]:
        return [job.use for job in self._owner.jobs.values()] if self._owner.term is not None else []
