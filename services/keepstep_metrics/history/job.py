"""One job: its groups, quorums, steps, failures and transfers. Pure."""

from __future__ import annotations

from collections import deque
from copy import copy
from dataclasses import asdict, replace
from typing import Any

from keepstep_mesh.protocol.names import name_of
from keepstep_mesh.protocol.telemetry_records import (
    MAX_VALUES,
    DurableRecord,
    EventRecord,
    StateRecord,
    StepRecord,
)
from keepstep_metrics.history import stragglers
from keepstep_metrics.history.durable import DurableProgress
from keepstep_metrics.history.events import BY_STABLE_NAME, JOB_ENDS, Event, integer, is_loss, reason_of
from keepstep_metrics.history.failures import Failure, FailureLog
from keepstep_metrics.history.group import Group
from keepstep_metrics.history.histogram import BINS, bin_of
from keepstep_metrics.history.sentences import sentence
from keepstep_metrics.history.stragglers import Standing
from keepstep_metrics.history.timeseries import lost_steps
from keepstep_metrics.history.timeseries.commits import Commits
from keepstep_metrics.history.timeseries.series import Series
from keepstep_metrics.history.timeseries.timeline import State
from keepstep_metrics.history.transfers import TransferLog
from keepstep_metrics.history.work import Work

MAX_GROUPS = 5000
"""Stable names in one job."""
MAX_GROUP_VALUES = 256
"""Values with a series for a group, all groups together."""
MAX_EVENTS = 500
"""Events in memory, for a reader whose stream broke for a moment."""
JUDGE_SECONDS = 1.0
"""Between two searches for stragglers."""
SILENT_SECONDS = 30.0
"""A group without a commit for this time is not compared with the others."""
IN_QUORUM = {State.TRAINING, State.HEALING, State.RETRYING}
"""States of a group that is a member of the quorum."""
CAN_BE_FORGOTTEN = {State.LOST, State.GONE, State.TRAINING}


class Job:
    def __init__(self, name: str, now: float) -> None:
        self.name = name
        self.first_seen = self.last_seen = now
        self.groups: dict[str, Group] = {}
        """By stable name."""
        self.step = self.quorum_id = self.epoch = 0
        self.formed_at = 0.0
        """When the quorum formed (Unix time); 0: it formed before a restart of this service."""
        self.participants: list[str] = []
        """Stable names of the members of the quorum."""
        self.is_over = False
        """Whether the job has ended or is closed, and no quorum has formed since."""
        self.joining: set[str] = set()
        """Stable names of groups that joined and are in no quorum yet."""
        self.highest = Series(1, "d")
        """The job's step."""
        self.steps = Series(2, "L")
        """Committed and discarded steps of all groups."""
        self.commits = Commits()
        self.histogram = Series(BINS, "L")
        """Seconds of committed steps."""
        self.values: dict[str, Series] = {}
        """Sum and count of each value that training scripts record."""
        self.group_values: dict[tuple[str, str], Series] = {}
        """The same by (value, stable name)."""
        self.events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self.failures = FailureLog()
        self.transfers = TransferLog()
        self.durable: DurableProgress | None = None
        """Its durable checkpoints; None: no group has reported one."""
        self.standings: dict[str, Standing] = {}
        """By stable name: how slow each group is."""
        self.judged_at = 0.0
        self.changes = 0
        """Grows with each record of the job."""

    def group(self, replica_id: str) -> Group | None:
        """Return the group, a new one if need be; None: the job has ``MAX_GROUPS`` groups."""
        name = name_of(replica_id)
        if (group := self.groups.get(name)) is None and len(self.groups) < MAX_GROUPS:
            group = self.groups[name] = Group(name, replica_id)
        return group

    @property
    def has_groups(self) -> bool:
        """Whether a group runs."""
        return any(group.is_there for group in self.groups.values())

    def forget_before(self, t: float) -> None:
        """Forget what ended before ``t``: old spans, and groups without a newer record that left or just train."""
        for group in [*self.groups.values()]:
            group.timeline.forget_before(t)
            if group.timeline.state in CAN_BE_FORGOTTEN and max(group.timeline.since, group.committed_at) < t:
                del self.groups[group.name]
        for key in [key for key in self.group_values if key[1] not in self.groups]:
            del self.group_values[key]

    def forget_after(self, t: float) -> None:
        """Forget what was recorded for a time after ``t``: the clock of this service was set back to ``t``.

        States, groups, and steps stay. Without this, no record would count until the clock is there again.
        """
        self.first_seen, self.last_seen = min(self.first_seen, t), min(self.last_seen, t)
        self.formed_at = min(self.formed_at, t)
        for series in (
            self.highest,
            self.steps,
            self.commits.series,
            self.histogram,
            *self.values.values(),
            *self.group_values.values(),
        ):
            series.forget_after(t)
        for group in self.groups.values():
            group.forget_after(t)
        self.events = deque((replace(one, t=min(one.t, t)) for one in self.events), MAX_EVENTS)
        self.failures.forget_after(t)
        self.transfers.forget_after(t)
        if self.durable is not None:
            self.durable.committed_at = min(self.durable.committed_at, t)

    # ---- records of workers

    def add_step(self, replica_id: str, step: StepRecord, now: float) -> None:
        group = self.group(replica_id)
        if group is None:
            return
        if replica_id not in group.ends:
            self._set_incarnation(group, replica_id)
        group.add_step(replica_id, step, now)
        if step.committed:
            self._count_commit(group, step)
        else:
            self.steps.count(step.t, 1)

    def _set_incarnation(self, group: Group, replica_id: str) -> None:
        """A new incarnation is judged by its own steps only."""
        if replica_id != group.replica_id:
            group.replica_id = replica_id
            group.restarts += 1
            group.quorum_id = 0
            group.busy.clear()
            group.whole.clear()
            self.standings.pop(group.name, None)

    def _count_commit(self, group: Group, step: StepRecord) -> None:
        if (standing := self.standings.get(group.name)) is not None and standing.straggler:
            standing.steps += 1
        self.step = max(self.step, step.step)
        self.highest.highest(step.t, step.step)
        self.steps.count(step.t, 0)
        self.commits.count(step.t, step.quorum_id, step.step)
        self.histogram.count(step.t, bin_of(step.seconds))
        if not step.heal_seconds:
            self._add_values(group, step)
        self.failures.on_commit(group.name, step.quorum_id, step.t)

    def _add_values(self, group: Group, step: StepRecord) -> None:
        """Add the values that the training script recorded, unless the group healed in this step with old weights."""
        for name, value in step.values.items():
            if name not in self.values and len(self.values) >= MAX_VALUES:
                continue
            self.values.setdefault(name, Series(2, "d")).add(step.t, (value, 1))
            group.values[name] = value
            key = name, group.name
            if key in self.group_values or len(self.group_values) < MAX_GROUP_VALUES:
                self.group_values.setdefault(key, Series(2)).add(step.t, (value, 1))

    def set_state(self, replica_id: str, record: StateRecord) -> None:
        if (group := self.group(replica_id)) is not None:
            group.set_state(replica_id, record)
            if group.timeline.state is State.STANDBY:
                self.joining.discard(group.name)

    def add_durable(self, record: DurableRecord) -> None:
        self.durable = self.durable or DurableProgress(record.t)
        self.durable.add(record)

    # ---- stragglers

    def judge(self, now: float) -> list[str]:
        """Return the stable names of groups that became stragglers. ``now``: this service's clock."""
        if 0 <= now - self.judged_at < JUDGE_SECONDS:
            return []
        self.judged_at = now
        compared = {
            name: busy
            for name, group in self.groups.items()
            if now - group.committed_at < SILENT_SECONDS and (busy := group.busy_p50) is not None
        }
        new = stragglers.judge(self.standings, compared, now)
        for name, group in self.groups.items():
            group.set_slow(now, slow=name in self.standings and self.standings[name].straggler)
        return new

    def straggler(self, steps: int) -> Group | None:
        """Return the slowest running group that was a straggler for at least ``steps`` committed steps in a row."""
        slow = {name: one.score for name, one in self.standings.items() if one.straggler and one.steps >= steps}
        there = [one for name in slow if (one := self.groups.get(name)) and not one.is_leaving]
        return max(there, key=lambda group: slow[group.name], default=None)

    def add_straggler_event(self, name: str, t: float, number: int) -> Event:
        """Return the event that the group ``name`` became a straggler."""
        found = stragglers.spread({one: standing.seconds for one, standing in self.standings.items()})
        standing = self.standings[name]
        detail = {"seconds": standing.seconds, "median": found.median if found else 0.0, "score": standing.score}
        event = Event(number, t, "straggler", name, sentence("straggler", name, detail), detail)
        self.events.append(event)
        return event

    # ---- events of lighthouses

    def add_event(self, record: EventRecord, number: int) -> Event:
        """Apply an event. Return it with ``number``, its number in this service."""
        self.epoch = max(self.epoch, record.epoch)
        name = self._name(record)
        if record.event in BY_STABLE_NAME:
            group = self.groups.get(name)
        else:
            group = self.group(record.replica_id) if name else None
        if group is not None:
            self._change_group(group, record)
        if record.event == "quorum":
            self._form_quorum(record.t, integer(record.detail.get("quorum_id")), record.detail.get("members"))
        elif record.event == "went_back":
            self._go_back(record.t, integer(record.detail.get("to")))
        elif record.event in (*JOB_ENDS, "closed"):
            self._end_all(record.t, gone=record.event != "closed")
        event = Event(number, record.t, record.event, name, sentence(record.event, name, record.detail), record.detail)
        self.events.append(event)
        return event

    def _go_back(self, t: float, step: int) -> None:
        """The job continues from ``step``: the time of the later steps was lost."""
        self.step = step
        if self.durable is not None:
            self.durable.went_back(step)
        if (since := lost_steps.reached_at(self.highest, step, t)) is not None:
            lost_steps.lose((group.timeline for group in self.groups.values()), since, t)

    def _end_all(self, t: float, *, gone: bool) -> None:
        """The job has ended. The time until a lost group comes back does not count. ``gone``: no group is left."""
        self.is_over = True
        self.participants = [] if gone else self.participants
        for group in self.groups.values():
            group.forget_loss(t)

    def _name(self, record: EventRecord) -> str:
        """Return the stable name of the event's group. Some events have it directly, and it may have colons."""
        given = record.replica_id
        return given if record.event in BY_STABLE_NAME and given in self.groups else name_of(given)

    def _form_quorum(self, t: float, quorum_id: int, members: Any) -> None:
        """Apply a new quorum. A group of the last quorum that is not in it is lost, even without an event for that:
        a lighthouse that dies reports no loss.
        """
        if quorum_id < self.quorum_id:
            if t <= self.formed_at:
                return  # a late report
            self.step = 0  # the job starts over
            self.commits.begin_again()
        self.quorum_id, self.formed_at, self.is_over = quorum_id, t, False
        self.participants = [name_of(str(one)) for one in members[:MAX_GROUPS]] if isinstance(members, list) else []
        self.joining.difference_update(self.participants)
        for name in self.participants:
            if (group := self.groups.get(name)) is not None:
                group.was_member = True
                group.parted = False  # a new leader knows of no probation, and reports no end of it
        for name in self.groups.keys() - {*self.participants}:
            if (timeline := self.groups[name].timeline).state in IN_QUORUM:
                timeline.mark(t, State.LOST)

    def _change_group(self, group: Group, record: EventRecord) -> None:
        t, replica_id = record.t, record.replica_id
        match record.event:
            case "joined":
                self._set_incarnation(group, replica_id)
                group.begin(replica_id, t)
                if not record.detail.get("member"):
                    self.joining.add(group.name)
            case "lost" | "left" if is_loss(record.event, record.detail):
                reason = reason_of(record.detail)
                group.fail(t, reason)
                if not self._is_missed(group):
                    self._end(group, replica_id, t, State.GONE)
                    return
                self._end(group, replica_id, t, State.LOST)
                self.failures.add(Failure(t, group.name, reason, self.quorum_id))
            case "evicted":
                group.told_to_leave = True
                group.forget_loss(t)
            case "left" | "moved":
                self._end(group, replica_id, t, State.GONE)
            case "spare_in":
                group.timeline.mark(t, State.WAITING_QUORUM)
                self.joining.add(group.name)
            case "parted":
                group.parted = True
                group.fail(t, f"kept out: {reason_of(record.detail)}")
                if group.is_there:
                    group.timeline.mark(t, State.WAITING_QUORUM)  # before the quorum without it: it is not lost
            case "let_in":
                group.parted = False
            case "exposed":
                group.exposed_at, group.exposed_why = group.exposed_at or t, reason_of(record.detail)
            case "covered":
                group.exposed_at = 0.0
            case "drain":
                group.told_to_leave = replica_id == group.replica_id
                group.end(replica_id, t, State.DRAINING)
            case "heal_began":
                group.timeline.mark(t, State.HEALING)
                self.transfers.begin_heal(group.name, record)
            case "healed" | "heal_failed":
                group.timeline.mark(t, State.TRAINING if record.event == "healed" else State.RETRYING)
                self.transfers.end_heal(group.name, record)
                group.failed_heals = 0 if record.event == "healed" else group.failed_heals + 1
                if record.event == "heal_failed":
                    group.fail(t, f"failed to heal: {reason_of(record.detail)}")

    def _is_missed(self, group: Group) -> bool:
        """Return whether the loss of the group is a failure of the job.

        It is none if the group never trained, because it was refused or came too late; if an operator told it to leave;
        and after the end of the job.
        """
        return (group.was_member or group.step > 0) and not group.told_to_leave and not self.is_over

    def _end(self, group: Group, replica_id: str, t: float, state: State) -> None:
        group.end(replica_id, t, state)
        self.joining.discard(group.name)
        if state is not State.DRAINING and replica_id == group.replica_id and group.name in self.participants:
            self.participants.remove(group.name)

    # ---- over a restart

    def dumping(self) -> Work[dict[str, Any]]:
        groups = []
        for one in self.groups.values():
            groups.append(one.dump())
            yield
        plain = (
            "name",
            "first_seen",
            "last_seen",
            "step",
            "quorum_id",
            "epoch",
            "participants",
            "judged_at",
            "is_over",
        )
        return {
            **{key: copy(getattr(self, key)) for key in plain},
            "joining": sorted(self.joining),
            "groups": groups,
            "steps": self.steps.dump(),
            "commits": self.commits.dump(),
            "highest": self.highest.dump(),
            "histogram": self.histogram.dump(),
            "values": {name: one.dump() for name, one in self.values.items()},
            "group_values": [(*key, one.dump()) for key, one in self.group_values.items()],
            "failures": self.failures.dump(),
            "transfers": self.transfers.dump(),
            "durable": self.durable and self.durable.dump(),
            "standings": {name: asdict(one) for name, one in self.standings.items()},
        }

    @classmethod
    def load(cls, dumped: dict[str, Any]) -> Job:
        job = cls(dumped["name"], dumped["first_seen"])
        for key in ("last_seen", "step", "quorum_id", "epoch", "participants", "judged_at"):
            setattr(job, key, dumped[key])
        job.is_over = dumped.get("is_over", False)
        job.joining = set(dumped["joining"])
        job.groups = {one["name"]: Group.load(one) for one in dumped["groups"]}
        job.highest.load(dumped["highest"])
        if "commits" in dumped:  # the release before had neither
            job.steps.load(dumped["steps"])
            job.commits.load(dumped["commits"])
        job.histogram.load(dumped["histogram"])
        for name, series in dumped["values"].items():
            job.values[name] = Series(2, "d")
            job.values[name].load(series)
        for value, name, series in dumped["group_values"]:
            job.group_values[value, name] = Series(2)
            job.group_values[value, name].load(series)
        job.failures.load(dumped["failures"])
        job.transfers.load(dumped["transfers"])
        if durable := dumped.get("durable"):
            job.durable = DurableProgress(**durable)
        job.standings = {name: Standing(**one) for name, one in dumped["standings"].items()}
        return job
