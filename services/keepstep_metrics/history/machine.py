"""What the metrics service knows of each job. Records in, a picture out; no clock, no I/O.

The same batches in the same order give the same picture, whoever replays them: each is applied with the time at which
it came, and events get their numbers here. Everything is bounded; ``dump`` and ``load`` carry all of it over a restart.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

from keepstep_mesh.protocol.names import name_of
from keepstep_mesh.protocol.telemetry_records import (
    MAX_TEXT,
    MAX_VALUES,
    Batch,
    EventRecord,
    StateRecord,
    StepRecord,
    UploadRecord,
)
from keepstep_metrics.history import stragglers
from keepstep_metrics.history.histogram import BINS, bin_of
from keepstep_metrics.history.sentences import sentence
from keepstep_metrics.history.series import Series
from keepstep_metrics.history.stragglers import Standing
from keepstep_metrics.history.timeline import State, Timeline

MAX_JOBS = 100
MAX_GROUPS = 5000
"""Of one job; stable names."""
MAX_SENDERS = 20_000
MAX_EVENTS = 500
"""Of a job, in memory: for readers of its stream that were away for a moment."""
MAX_FAILURES = 1000
MAX_OPEN_FAILURES = 100
"""Looked through at each commit."""
MAX_TRANSFERS = 500
AHEAD_SECONDS = 60.0
"""A record from further in the future has a wrong clock, and is left out."""
KEPT_SECONDS = 86400.0
IDLE_SECONDS = 3600.0
"""A job of which nothing was heard for so long makes room for another; one that has ended does so at once."""
MAX_DELETED = 1000
"""Deleted jobs that are remembered."""
MAX_WHOLE = 2**63 - 1
RECENT_STEPS = 64
ORDERS = ("evicted", "readmitted")
"""Events that may be about a stable name; all others are about an incarnation."""
SHORT_WAIT = 0.05
"""Seconds; a shorter wait for the quorum is part of a step as it is meant to be."""
JUDGE_SECONDS = 1.0
SILENT_SECONDS = 30.0
"""A group that committed nothing for so long is not compared with others."""


@dataclass(frozen=True, slots=True)
class Event:
    """``id``: this service's number; grows with each event of any job."""

    id: int
    t: float
    event: str
    name: str
    sentence: str
    detail: dict[str, Any]


@dataclass(slots=True)
class Failure:
    t: float
    name: str
    cause: str
    quorum_id: int
    committed_at: float | None = None
    """When a group committed a step under a later quorum."""
    recovered_at: float | None = None
    """When the group itself did again."""


@dataclass(slots=True)
class Transfer:
    kind: str
    """``heal`` or ``upload``."""
    name: str
    step: int
    began: float
    source: str = ""
    via: str = ""
    bytes_done: int = 0
    bytes_total: int = 0
    bytes_per_second: float = 0.0
    seconds_left: float | None = None
    ended: float | None = None
    error: str = ""


@dataclass(slots=True)
class Group:
    name: str
    replica_id: str = ""
    timeline: Timeline = field(default_factory=Timeline)
    steps: Series = field(default_factory=lambda: Series(3))
    """Committed, discarded, seconds of the committed ones."""
    step: int = 0
    committed_at: float = 0.0
    """When its last commit was told, by this service's clock."""
    values: dict[str, float] = field(default_factory=dict)
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    busy: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    ends: dict[str, float] = field(default_factory=dict)
    """incarnation -> when it was lost, left, or was told to leave: nothing that it says of later changes its state."""

    @property
    def is_there(self) -> bool:
        return self.timeline.state not in (State.LOST, State.GONE)

    @property
    def seconds_p50(self) -> float | None:
        return median(self.recent) if self.recent else None


class Job:
    def __init__(self, name: str, now: float) -> None:
        self.name = name
        self.first_seen = self.last_seen = now
        self.groups: dict[str, Group] = {}
        self.step = self.quorum_id = self.epoch = 0
        self.formed_at = 0.0
        """When that quorum formed, Unix seconds; not known of one before a restart of this service."""
        self.participants: list[str] = []
        self.joining: set[str] = set()
        self.highest = Series(1, "d")
        """The step of the job."""
        self.histogram = Series(BINS, "L")
        """Of seconds of committed steps."""
        self.values: dict[str, Series] = {}
        """Sum and count of what scripts record."""
        self.events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self.failures: deque[Failure] = deque(maxlen=MAX_FAILURES)
        self.open_failures: list[Failure] = []
        """Those that are not made good yet, or only just were."""
        self.transfers: deque[Transfer] = deque(maxlen=MAX_TRANSFERS)
        self.standings: dict[str, Standing] = {}
        self.judged_at = 0.0
        self.changes = 0
        """Grows with everything that is told of it."""

    def group(self, replica_id: str) -> Group | None:
        name = name_of(replica_id)
        if (group := self.groups.get(name)) is None and len(self.groups) < MAX_GROUPS:
            group = self.groups[name] = Group(name, replica_id)
        return group

    @property
    def at_work(self) -> bool:
        """A group is there."""
        return any(group.is_there for group in self.groups.values())

    def _is_now(self, group: Group, replica_id: str) -> None:
        """Another incarnation is judged by its own steps."""
        if replica_id != group.replica_id:
            group.replica_id = replica_id
            group.busy.clear()
            self.standings.pop(group.name, None)

    def straggler(self, steps: int) -> Group | None:
        """The slowest that is there and was a straggler for at least so many committed steps in a row."""
        slow = {name: one.score for name, one in self.standings.items() if one.straggler and one.steps >= steps}
        there = [one for name in slow if (one := self.groups.get(name)) and one.replica_id not in one.ends]
        return max(there, key=lambda group: slow[group.name], default=None)

    # ---- steps

    def take_step(self, replica_id: str, one: StepRecord, now: float) -> None:
        group = self.group(replica_id)
        if group is None:
            return
        t = one.t
        if replica_id not in group.ends:
            self._is_now(group, replica_id)
        self._fill(group, replica_id, one, t)
        if one.committed:
            group.committed_at = now
            self._count_commit(group, one, t)
        else:
            group.steps.count(t, 1)

    def _fill(self, group: Group, replica_id: str, one: StepRecord, t: float) -> None:
        begin, end = t - one.seconds, min(t, group.ends.get(replica_id, t))
        if group.timeline and replica_id not in group.ends and group.timeline.state in (State.LOST, State.GONE):
            group.timeline.mark(begin, State.WAITING_QUORUM)  # nobody told that it came
        waited = one.quorum_seconds if one.quorum_seconds >= SHORT_WAIT else 0.0
        healed = begin + waited + one.heal_seconds
        fill = group.timeline.fill
        fill(begin, min(begin + waited, end), State.WAITING_QUORUM)
        fill(begin + waited, min(healed, end), State.HEALING)
        fill(healed, end, State.TRAINING if one.committed else State.RETRYING)

    def _count_commit(self, group: Group, one: StepRecord, t: float) -> None:
        group.steps.add(t, (1, 0, one.seconds))
        group.step = one.step
        if not one.heal_seconds and one.quorum_seconds < SHORT_WAIT:
            group.recent.append(one.seconds)
        if one.busy_seconds is not None:
            group.busy.append(one.busy_seconds)
        if (standing := self.standings.get(group.name)) is not None and standing.straggler:
            standing.steps += 1
        self.step = max(self.step, one.step)
        self.highest.highest(t, one.step)
        self.histogram.count(t, bin_of(one.seconds))
        for name, value in one.values.items():
            if name not in self.values and len(self.values) >= MAX_VALUES:
                continue
            self.values.setdefault(name, Series(2, "d")).add(t, (value, 1))
            group.values[name] = value
        for failure in self.open_failures:
            if failure.t >= t:
                continue
            if one.quorum_id > failure.quorum_id and (failure.committed_at is None or t < failure.committed_at):
                failure.committed_at = t
            if failure.name == group.name and failure.recovered_at is None:
                failure.recovered_at = t

    def judge(self, now: float) -> list[str]:
        """The groups that are stragglers from now on. By the clock of this service, whatever those of groups say."""
        if 0 <= now - self.judged_at < JUDGE_SECONDS:
            return []
        self.judged_at = now
        compared = {
            name: median(group.busy)
            for name, group in self.groups.items()
            if len(group.busy) >= RECENT_STEPS // 4 and now - group.committed_at < SILENT_SECONDS
        }
        return stragglers.judge(self.standings, compared, now)

    def straggler_event(self, name: str, t: float, number: int) -> Event:
        """What is said of a group that became one."""
        found = stragglers.spread({one: standing.seconds for one, standing in self.standings.items()})
        standing = self.standings[name]
        detail = {"seconds": standing.seconds, "median": found.median if found else 0.0, "score": standing.score}
        event = Event(number, t, "straggler", name, sentence("straggler", name, detail), detail)
        self.events.append(event)
        return event

    # ---- what lighthouses and relays tell

    def take_event(self, one: EventRecord, number: int) -> Event:
        """The event, with its ``number`` here."""
        t, detail = one.t, one.detail
        self.epoch = max(self.epoch, one.epoch)
        name = self._name(one)
        if name and one.event not in ORDERS and (group := self.group(one.replica_id)) is not None:
            self._change_group(group, one)
        if one.event == "quorum":
            self._form(t, _whole(detail.get("quorum_id")), detail.get("members"))
        event = Event(number, t, one.event, name, sentence(one.event, name, detail), detail)
        self.events.append(event)
        return event

    def _name(self, one: EventRecord) -> str:
        """The stable name of the group that an event is about: an order may give that itself, colons and all."""
        given = one.replica_id
        return given if one.event in ORDERS and given in self.groups else name_of(given)

    def _form(self, t: float, quorum_id: int, members: Any) -> None:
        """A quorum. A group that was at work and is not in it is lost, though nobody told: the lighthouse died too."""
        if quorum_id < self.quorum_id:
            if t <= self.formed_at:
                return  # it is told late
            self.step = 0  # the job began anew
        self.quorum_id, self.formed_at = quorum_id, t
        self.participants = [name_of(str(one)) for one in members[:MAX_GROUPS]] if isinstance(members, list) else []
        self.joining.difference_update(self.participants)
        for name in self.groups.keys() - {*self.participants}:
            if (timeline := self.groups[name].timeline).state in AT_WORK:
                timeline.mark(t, State.LOST)

    def _change_group(self, group: Group, one: EventRecord) -> None:
        t, detail, whole = one.t, one.detail, one.replica_id
        reason = str(detail.get("reason", ""))[:MAX_TEXT]
        match one.event:
            case "joined":
                self._is_now(group, whole)
                group.ends.pop(whole, None)
                group.timeline.mark(t, State.WAITING_QUORUM)
                if not detail.get("member"):
                    self.joining.add(group.name)
            case "lost" | "failed":
                self._end(group, whole, t, State.LOST)
                self._fail(Failure(t, group.name, reason, self.quorum_id))
            case "left" | "moved":
                self._end(group, whole, t, State.GONE)
            case "drain":
                self._end(group, whole, t, State.DRAINING)
            case "heal_began":
                group.timeline.mark(t, State.HEALING)
                self.transfers.append(
                    Transfer("heal", group.name, _whole(detail.get("step")), t, name_of(str(detail.get("source", ""))))
                )
            case "healed" | "heal_failed":
                group.timeline.mark(t, State.TRAINING if one.event == "healed" else State.RETRYING)
                self._end_heal(group, t, detail)

    def _fail(self, failure: Failure) -> None:
        self.failures.append(failure)
        just_now = failure.t - SILENT_SECONDS  # an earlier commit may still be told of
        still_open = [one for one in self.open_failures if one.recovered_at is None or one.recovered_at > just_now]
        self.open_failures = [*still_open, failure][-MAX_OPEN_FAILURES:]

    def _end(self, group: Group, replica_id: str, t: float, state: State) -> None:
        """This incarnation does nothing of its own any more."""
        group.ends[replica_id] = t
        while len(group.ends) > 4:
            del group.ends[next(iter(group.ends))]
        if replica_id == group.replica_id:
            group.timeline.mark(max(t, group.timeline.since), state)
        if state is not State.DRAINING:
            self.joining.discard(group.name)

    def _end_heal(self, group: Group, t: float, detail: dict[str, Any]) -> None:
        for one in reversed(self.transfers):
            if one.name == group.name and one.kind == "heal" and one.ended is None:
                one.ended, one.error = t, str(detail.get("reason", ""))[:MAX_TEXT]
                one.bytes_done = _whole(detail.get("bytes"))
                one.bytes_total = max(one.bytes_total, one.bytes_done)
                one.via = str(detail.get("via", ""))
                one.bytes_per_second = _number(detail.get("bytes_per_second"))
                one.seconds_left = None
                return

    def take_upload(self, relay: str, one: UploadRecord) -> None:
        key = ("upload", one.checkpoint, relay, one.began)
        found = next((old for old in reversed(self.transfers) if (old.kind, old.name, old.via, old.began) == key), None)
        if found is None:
            found = Transfer("upload", one.checkpoint, one.step, one.began, via=relay)
            self.transfers.append(found)
        found.bytes_done, found.bytes_total = one.bytes_done, one.bytes
        found.bytes_per_second = one.bytes_per_second
        if one.state != "uploading":
            found.ended = one.t
            found.error = one.error

    # ---- over a restart

    def dump(self) -> dict[str, Any]:
        plain = ("name", "first_seen", "last_seen", "step", "quorum_id", "epoch", "participants", "judged_at")
        groups = [
            {
                **{key: getattr(one, key) for key in ("name", "replica_id", "step", "committed_at", "values", "ends")},
                "timeline": one.timeline.dump(),
                "steps": one.steps.dump(),
                "recent": [*one.recent],
                "busy": [*one.busy],
            }
            for one in self.groups.values()
        ]
        return {
            **{key: getattr(self, key) for key in plain},
            "joining": sorted(self.joining),
            "groups": groups,
            "highest": self.highest.dump(),
            "histogram": self.histogram.dump(),
            "values": {name: one.dump() for name, one in self.values.items()},
            "failures": [asdict(one) for one in self.failures],
            "transfers": [asdict(one) for one in self.transfers],
            "standings": {name: asdict(one) for name, one in self.standings.items()},
        }

    @classmethod
    def load(cls, plain: dict[str, Any]) -> Job:
        job = cls(plain["name"], plain["first_seen"])
        for key in ("last_seen", "step", "quorum_id", "epoch", "participants", "judged_at"):
            setattr(job, key, plain[key])
        job.joining = set(plain["joining"])
        for one in plain["groups"]:
            group = job.groups[one["name"]] = Group(one["name"], one["replica_id"], Timeline.load(one["timeline"]))
            group.steps.load(one["steps"])
            group.step, group.committed_at = one["step"], one["committed_at"]
            group.values, group.ends = one["values"], one["ends"]
            group.recent.extend(one["recent"])
            group.busy.extend(one["busy"])
        job.highest.load(plain["highest"])
        job.histogram.load(plain["histogram"])
        for name, dumped in plain["values"].items():
            job.values[name] = Series(2, "d")
            job.values[name].load(dumped)
        job.failures.extend(Failure(**one) for one in plain["failures"])
        job.open_failures = [one for one in job.failures if one.recovered_at is None][-MAX_OPEN_FAILURES:]
        job.transfers.extend(Transfer(**one) for one in plain["transfers"])
        job.standings = {name: Standing(**one) for name, one in plain["standings"].items()}
        return job


class MetricsCore:
    """All jobs, and how far each sender has come."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.last_event = 0
        self.deleted: OrderedDict[str, Event] = OrderedDict()
        """The deletion of each job that was deleted; nothing that happened before it counts."""
        self._senders: dict[tuple[str, str], int] = {}
        """(name, boot) -> last number taken; who spoke last stands last."""
        self.dropped: dict[tuple[str, str], int] = {}
        """(name, boot) -> records that the sender dropped."""
        self.dropped_total = 0
        self.left_out = 0
        """Records of one job or group too many, or whose time is yet to come."""

    def apply(self, batch: Batch, now: float) -> tuple[int, list[tuple[str, Event]]]:
        """How many records were new, and the events that they made, each with its job."""
        head = batch.head
        key = head.name, head.boot
        seen = self._senders.pop(key, 0)
        self._senders[key] = max(seen, head.first + len(batch.records) - 1)
        newly_dropped = max(0, head.dropped - self.dropped.get(key, 0))
        self.dropped_total = min(self.dropped_total + newly_dropped, MAX_WHOLE)
        self.dropped[key] = head.dropped
        while len(self._senders) > MAX_SENDERS:
            gone = next(iter(self._senders))
            del self._senders[gone]
            self.dropped.pop(gone, None)
        made: list[tuple[str, Event]] = []
        new = batch.records[max(0, seen + 1 - head.first) :]
        for record in new:
            if record is None:
                continue
            name = record.job if isinstance(record, EventRecord | UploadRecord) else head.job
            job = self._job(name, now) if name and self._counts(name, record.t, now) else None
            if job is None or (head.source == "worker" and job.group(head.name) is None):
                self.left_out += 1
                continue
            job.last_seen = max(job.last_seen, now)
            job.changes += 1
            match record:
                case StepRecord():
                    job.take_step(head.name, record, now)
                case StateRecord():
                    self._take_state(job, head.name, record)
                case EventRecord():
                    self.last_event += 1
                    made.append((name, job.take_event(record, self.last_event)))
                    if record.event == DELETED:
                        self._delete(*made[-1])
                case UploadRecord():
                    job.take_upload(head.name, record)
        if (job := self.jobs.get(head.job)) is not None:
            for slow in job.judge(now):
                self.last_event += 1
                made.append((job.name, job.straggler_event(slow, now, self.last_event)))
        return len(new), made

    def _counts(self, job: str, t: float, now: float) -> bool:
        deleted = self.deleted.get(job)
        return t <= now + AHEAD_SECONDS and (deleted is None or t > deleted.t)

    def _delete(self, job: str, event: Event) -> None:
        del self.jobs[job]
        self.deleted[job] = event
        self.deleted.move_to_end(job)
        while len(self.deleted) > MAX_DELETED:
            self.deleted.popitem(last=False)

    def _take_state(self, job: Job, replica_id: str, one: StateRecord) -> None:
        group = job.group(replica_id)
        if group is not None and replica_id not in group.ends and one.state in SAID:
            group.timeline.mark(one.t, State(one.state))

    def _job(self, name: str, now: float) -> Job | None:
        if (job := self.jobs.get(name)) is None:
            if len(self.jobs) >= MAX_JOBS:
                silent = sorted(self.jobs.values(), key=lambda one: one.last_seen)
                goes = next((one for one in silent if not one.at_work), silent[0])
                if goes.at_work and now - goes.last_seen < IDLE_SECONDS:
                    return None
                del self.jobs[goes.name]
            job = self.jobs[name] = Job(name, now)
        return job

    def forget_before(self, t: float) -> None:
        """Groups that ended their life before ``t``, or train and say nothing, silent jobs, and old spans go."""
        for job in [*self.jobs.values()]:
            if job.last_seen < t:
                del self.jobs[job.name]
                continue
            for group in [*job.groups.values()]:
                group.timeline.forget_before(t)
                if group.timeline.state in CAN_GO and max(group.timeline.since, group.committed_at) < t:
                    del job.groups[group.name]

    def dump(self) -> dict[str, Any]:
        return {
            "jobs": [job.dump() for job in self.jobs.values()],
            "last_event": self.last_event,
            "deleted": [[name, asdict(event)] for name, event in self.deleted.items()],
            "senders": [[*key, last, self.dropped.get(key, 0)] for key, last in self._senders.items()],
            "dropped_total": self.dropped_total,
        }

    def load(self, plain: dict[str, Any]) -> None:
        for one in plain["jobs"]:
            job = Job.load(one)
            self.jobs[job.name] = job
        self.last_event, self.dropped_total = plain["last_event"], plain["dropped_total"]
        self.deleted.update((name, Event(**event)) for name, event in plain.get("deleted", []))
        for name, boot, last, dropped in plain["senders"]:
            self._senders[name, boot] = last
            self.dropped[name, boot] = dropped


DELETED = "job_deleted"
"""Event of a lighthouse that ends a job."""
AT_WORK = {State.TRAINING, State.HEALING, State.RETRYING}
CAN_GO = {State.LOST, State.GONE, State.TRAINING}
SAID = {one.value for one in (State.TRAINING, State.WAITING_QUORUM, State.HEALING, State.RETRYING, State.DRAINING)}


def _whole(value: Any) -> int:
    return value if type(value) is int and 0 <= value <= MAX_WHOLE else 0


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else 0.0
