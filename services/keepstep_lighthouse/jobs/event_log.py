"""The event log: numbered entries for each job. The latest ones are in memory; a file, if given, has all.

Numbers grow for ever, over restarts and leaders too: the epoch times 2**32 plus a count. So a reader that says "after
N" gets what is new, whichever lighthouse it asks. The events of other lighthouses are copied (``event_copies``).

In a file each term begins with an event ``term``, of no job, that names the process. So ``keepstep check-history`` can
tell from the files of all lighthouses that no epoch had two owners, and that no line is missing.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import time
import uuid
from bisect import bisect_right
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from keepstep_lighthouse.store.contract import StoreError
from keepstep_mesh.config.disk_space import write_failure
from keepstep_mesh.config.log_limiter import LogLimiter
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.protocol.membership import Data
from keepstep_mesh.protocol.stack_messages import RankStacks
from keepstep_mesh.serving.notifier import Notifier
from keepstep_mesh.threads.starting import ThreadPoolExecutor

KEPT_PER_JOB = 10_000
KEPT_IN_ALL = 100_000
"""Limit of all lists together; the longest lists drop their oldest events first."""
MAX_ENDINGS = 100
"""Number of deleted jobs whose last event is kept."""
MAX_FILE_BYTES = 64 * 1024 * 1024
"""Size at which the file is renamed to ``name.1``, replacing the previous one."""
MAX_UNWRITTEN = 10_000
"""Limit of events that wait for the disk; further ones are not written to the file, and counted."""
MAX_PRIVATE = 500
"""Number of events of all jobs whose private texts are kept."""
EVERY_JOB = "*"
"""Key that wakes the followers of all jobs in the notifier. No job can have this name."""

log = get_logger("keepstep.lighthouse.events")


@dataclass(frozen=True, slots=True)
class Happened:
    """One entry. ``time``: Unix seconds. ``replica_id``: a stable name or an incarnation, empty for the job itself."""

    id: int
    time: float
    job: str
    epoch: int
    kind: str
    replica_id: str
    detail: dict[str, Data]

    def json(self) -> str:
        return json.dumps(asdict(self), default=repr)


class EventLog:
    """``on_event`` is called with each event that is added; ``notifier`` wakes followers of the job."""

    def __init__(self, on_event: Callable[[Happened], None] = lambda _: None) -> None:
        self._on_event = on_event
        self.counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        """By job and kind, since this process started; dropped with the job."""
        self.totals: Counter[str] = Counter()
        """By kind, of all jobs, since this process started."""
        self.endings: OrderedDict[str, Happened] = OrderedDict()
        """The last event of each recently deleted job."""
        self._kept: dict[str, list[Happened]] = {}
        self._kept_in_all = 0
        self._forgotten: dict[str, int] = {}
        """Number of the last event that was dropped from memory, by job."""
        self.private: OrderedDict[int, tuple[str, tuple[RankStacks, ...]]] = OrderedDict()
        """Log and stacks of incidents, by number: for administrators, in the memory of this lighthouse only."""
        self.notifier = Notifier()
        self._epoch = 0
        self._last_id = 0

    def begin_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._last_id = max(self._last_id, epoch << 32)

    def add(self, job: str, kind: str, replica_id: str, detail: dict[str, Data], now_unix: float) -> Happened:
        self._last_id += 1
        self.counts[job][kind] += 1
        self.totals[kind] += 1
        happened = Happened(self._last_id, now_unix, job, self._epoch, kind, replica_id, detail)
        self._keep(happened)
        self._on_event(happened)
        self.notifier.notify(job)
        self.notifier.notify(EVERY_JOB)
        return happened

    def keep_private(self, number: int, log: str, stacks: tuple[RankStacks, ...]) -> None:
        """Keep the texts of an incident; the oldest make room."""
        self.private[number] = log, stacks
        while len(self.private) > MAX_PRIVATE:
            self.private.popitem(last=False)

    def copy(self, happened: Happened) -> None:
        """Keep an event of another lighthouse, unless it is known or its job was deleted since. Do not count it."""
        job, kept = happened.job, self._kept.get(happened.job, [])
        place = bisect_right(kept, happened.id, key=lambda one: one.id)
        ended = self.endings.get(job)
        dropped = max(self._forgotten.get(job, 0), ended.id if ended is not None else 0)
        if happened.id <= dropped or (place and kept[place - 1].id == happened.id):
            return
        if happened.kind != "job_deleted":
            self.counts[job]  # so that ``forget_others`` knows the job
            self._keep(happened, place)
        elif place == len(kept):
            self._keep(happened)
            self.forget(job)
        elif place:  # a job of this name was created since
            self._trim(job, len(kept) - place)

    def _keep(self, happened: Happened, place: int | None = None) -> None:
        """``place``: its index among the events of its job; None: it is the newest."""
        kept = self._kept.setdefault(happened.job, [])
        kept.insert(len(kept) if place is None else place, happened)
        self._kept_in_all += 1
        if len(kept) > KEPT_PER_JOB + KEPT_PER_JOB // 10:
            self._trim(happened.job, KEPT_PER_JOB)
        while self._kept_in_all > KEPT_IN_ALL:
            longest = max(self._kept, key=lambda job: len(self._kept[job]))
            self._trim(longest, len(self._kept[longest]) * 3 // 4)

    def _trim(self, job: str, count: int) -> None:
        """Keep the newest ``count`` events of ``job``."""
        kept = self._kept[job]
        gone = len(kept) - count
        self._forgotten[job] = kept[gone - 1].id
        self._kept_in_all -= gone
        del kept[:gone]

    @property
    def jobs(self) -> set[str]:
        """Jobs with events in memory, without ``endings``."""
        return {*self._kept, *self.counts} - {""}

    def forget(self, job: str) -> None:
        """Drop a deleted job, except for its last event, which followers still read."""
        kept = self._kept.pop(job, [])
        for happened in kept:
            self.private.pop(happened.id, None)
        self._kept_in_all -= len(kept)
        self._forgotten.pop(job, None)
        self.counts.pop(job, None)
        if kept and kept[-1].kind == "job_deleted":
            self.endings[job] = kept[-1]
            self.endings.move_to_end(job)
            while len(self.endings) > MAX_ENDINGS:
                self.endings.popitem(last=False)
        self.notifier.notify(job)

    def forget_others(self, jobs: Collection[str]) -> None:
        """Drop jobs that are not among ``jobs``: another leader may have deleted them."""
        for job in self.counts.keys() - {"", *jobs}:
            self.forget(job)

    def after(self, job: str, number: int, limit: int) -> list[Happened]:
        """Return the first ``limit`` events of ``job`` in memory that are newer than ``number``."""
        kept = self._kept.get(job)
        if kept is None:
            kept = [self.endings[job]] if job in self.endings else []
        start = bisect_right(kept, number, key=lambda one: one.id)
        return kept[start : start + limit]

    def of_all_jobs_after(self, number: int, limit: int) -> list[Happened]:
        """Return the first ``limit`` events of all jobs in memory that are newer than ``number``."""
        found = [one for job in self._kept.keys() - {""} for one in self.after(job, number, limit)]
        found += [one for one in self.endings.values() if one.id > number]
        return sorted(found, key=lambda one: one.id)[:limit]

    def newest(self, job: str, limit: int) -> list[Happened]:
        """Return the last ``limit`` events of ``job``, oldest first."""
        kept = self._kept.get(job, [])
        return kept[max(0, len(kept) - limit) :]

    def missed(self, job: str, number: int) -> bool:
        """Return whether events of ``job`` newer than ``number`` were dropped from memory."""
        return number < self._forgotten.get(job, 0)

    def latest(self, job: str, kind: str, replica_id: str) -> Happened | None:
        matching = (h for h in reversed(self._kept.get(job, [])) if h.kind == kind and h.replica_id == replica_id)
        return next(matching, None)

    async def open(self) -> None:
        """Load the events of earlier processes, if a file has them; call it once, first."""

    async def close(self) -> None:
        """Wait until everything is written."""


class FiledEventLog(EventLog):
    """Also append each event to a file of JSON lines, in a thread of its own."""

    def __init__(self, path: Path, on_event: Callable[[Happened], None] = lambda _: None) -> None:
        super().__init__(on_event)
        self._path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="keepstep-events")
        self._unwritten: deque[Happened] = deque()
        self._dropped = self._dropped_said = 0
        self._why_dropped = ""
        self._failures = LogLimiter()
        self._owner = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._writing: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Load the end of the file. Raise ``StoreError`` if the file cannot be used."""
        loop, path = asyncio.get_running_loop(), self._path
        try:
            for happened in await loop.run_in_executor(self._thread, _tail, path):
                self._keep(happened)
                self._last_id = max(self._last_id, happened.id)
                if happened.kind == "job_deleted":
                    self.forget(happened.job)
        except OSError as error:
            self._thread.shutdown()
            reason = write_failure(error, path)
            raise StoreError(f"the event log {path} cannot be used: {reason}; give another --event-log") from error

    def begin_epoch(self, epoch: int) -> None:
        super().begin_epoch(epoch)
        self.add("", "term", "", {"owner": self._owner}, time.time())

    def add(self, job: str, kind: str, replica_id: str, detail: dict[str, Data], now_unix: float) -> Happened:
        happened = super().add(job, kind, replica_id, detail, now_unix)
        if len(self._unwritten) >= MAX_UNWRITTEN:
            self._dropped += 1
            self._why_dropped = "the disk is too slow"
        else:
            self._unwritten.append(happened)
        if self._writing is None:
            self._writing = asyncio.ensure_future(self._write())
        return happened

    async def _write(self) -> None:
        loop = asyncio.get_running_loop()
        while self._unwritten:
            batch = list(self._unwritten)
            self._unwritten.clear()
            try:
                await loop.run_in_executor(self._thread, _append, self._path, batch)
            except OSError as error:
                self._dropped += len(batch)
                self._why_dropped = write_failure(error, self._path)
            if self._dropped > self._dropped_said and self._failures.allows(time.monotonic()):
                self._dropped_said = self._dropped
                facts = {"path": str(self._path), "dropped": self._dropped, "error": self._why_dropped}
                log.error("events were not written", **facts)
        self._writing = None

    async def close(self) -> None:
        if self._writing is not None:
            await self._writing
        self._thread.shutdown()


def _tail(path: Path) -> list[Happened]:
    """Return the last events of the previous file and of this one, in order. Skip invalid lines."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read() != b"\n":
                # The next event must not continue what a kill cut off.
                file.write(b"\n")
    lines: deque[str] = deque(maxlen=KEPT_PER_JOB)
    for part in (_before(path), path):
        if part.exists():
            with part.open(encoding="utf-8", errors="replace") as file:
                lines.extend(file)
    events = []
    for line in lines:
        try:
            events.append(Happened(**json.loads(line)))
        except (ValueError, TypeError):
            log.warning("invalid line in the event log", path=str(path), line=line[:200].rstrip())
    return sorted(events, key=lambda one: one.id)


def _append(path: Path, events: Iterable[Happened]) -> None:
    """Append all lines, or none and raise ``OSError``."""
    if path.exists() and path.stat().st_size > MAX_FILE_BYTES:
        os.replace(path, _before(path))  # noqa: PTH105
    left = "".join(f"{one.json()}\n" for one in events).encode()
    with path.open("ab", buffering=0) as file:
        size = file.tell()
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:
            file.truncate(size)  # the next event must not continue what a full disk cut off
            raise


def _before(path: Path) -> Path:
    return path.with_name(path.name + ".1")
