"""One replica group: its timeline, its steps, and the ends of its incarnations. Pure."""

from __future__ import annotations

from collections import deque
from copy import copy
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from keepstep_mesh.protocol.telemetry_records import StateRecord, StepRecord
from keepstep_metrics.history.timeseries.series import Series
from keepstep_metrics.history.timeseries.timeline import State, Timeline

RECENT_STEPS = 64
MAX_ENDS = 4
MAX_SLOW = 100
SHORT_WAIT_SECONDS = 0.05
"""A shorter wait for the quorum counts as training."""
REPORTED_STATES = {state.value for state in State} - {State.LOST.value, State.GONE.value}

PLAIN = (
    *("step", "committed_at", "values", "ends", "restarts", "failed_heals", "error", "error_at", "parted"),
    *("quorum_id", "epoch", "participants", "was_member", "told_to_leave", "exposed_at", "exposed_why"),
)
"""Fields that a dump has as they are."""


@dataclass(slots=True)
class Group:
    name: str
    """Stable name."""
    replica_id: str = ""
    """Current incarnation."""
    timeline: Timeline = field(default_factory=Timeline)
    steps: Series = field(default_factory=lambda: Series(3))
    """Committed steps, discarded steps, seconds of the committed ones."""
    step: int = 0
    quorum_id: int = 0
    """Of the last step of its incarnation, as the next two; 0: unknown."""
    epoch: int = 0
    participants: int = 0
    committed_at: float = 0.0
    """When its last commit was reported, by this service's clock."""
    values: dict[str, float] = field(default_factory=dict)
    """Last values that its training script recorded."""
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    """Seconds of its last committed steps without a wait or a heal."""
    busy: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    """``busy_seconds`` of the last committed steps of this incarnation."""
    whole: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    """``seconds`` of the same steps."""
    slow: deque[tuple[float, float | None]] = field(default_factory=lambda: deque(maxlen=MAX_SLOW))
    """When it was a straggler (from, to); None: still."""
    restarts: int = 0
    """Incarnations after its first one."""
    failed_heals: int = 0
    """Failed heals since the last one that succeeded."""
    error: str = ""
    """Why it was lost, failed to heal, or was parted, the last time."""
    error_at: float = 0.0
    exposed_at: float = 0.0
    """Since when a keeper has no copies of its shards (a model that exists once); 0: all have."""
    exposed_why: str = ""
    parted: bool = False
    """Whether it is on probation, and kept out of quorums."""
    was_member: bool = False
    """Whether it was in a quorum that this service heard of."""
    told_to_leave: bool = False
    """Whether an operator evicted it, or its current incarnation was asked to leave: no group waits for its return."""
    ends: dict[str, float] = field(default_factory=dict)
    """Incarnation -> when it was lost, left, or was asked to leave. Its later records do not change the state."""

    @property
    def is_there(self) -> bool:
        return self.timeline.state not in (State.LOST, State.GONE)

    @property
    def is_leaving(self) -> bool:
        return self.replica_id in self.ends

    @property
    def seconds_p50(self) -> float | None:
        return median(self.recent) if self.recent else None

    @property
    def busy_p50(self) -> float | None:
        """Median of ``busy``; None: too few steps."""
        return median(self.busy) if len(self.busy) >= RECENT_STEPS // 4 else None

    @property
    def whole_p50(self) -> float | None:
        return median(self.whole) if self.whole else None

    def set_slow(self, t: float, *, slow: bool) -> None:
        """Note from ``t`` on whether the group is a straggler."""
        since, until = self.slow[-1] if self.slow else (t, t)
        if slow and until is not None:
            self.slow.append((t, None))
        elif not slow and until is None:
            self.slow[-1] = since, t

    def fail(self, t: float, error: str) -> None:
        self.error, self.error_at = error, t

    def add_step(self, replica_id: str, step: StepRecord, now: float) -> None:
        self._fill_timeline(replica_id, step)
        self.quorum_id, self.epoch, self.participants = step.quorum_id, step.epoch, step.participants
        if not step.committed:
            self.steps.count(step.t, 1)
            return
        self.committed_at = now
        self.steps.add(step.t, (1, 0, step.seconds))
        self.step = step.step
        if not step.heal_seconds and step.quorum_seconds < SHORT_WAIT_SECONDS and not step.retries:
            self.recent.append(step.seconds)
        if step.busy_seconds is not None:
            self.busy.append(step.busy_seconds)
            self.whole.append(step.seconds)

    def _fill_timeline(self, replica_id: str, step: StepRecord) -> None:
        begin, end = step.t - step.seconds, min(step.t, self.ends.get(replica_id, step.t))
        if self.timeline and replica_id not in self.ends and not self.is_there:
            self.timeline.mark(begin, State.WAITING_QUORUM)  # the lighthouse's report of its return is missing
        waited = step.quorum_seconds if step.quorum_seconds >= SHORT_WAIT_SECONDS else 0.0
        waiting = State.WAITING_SLOW_GROUP if self._is_in_quorum_of(step) else State.WAITING_QUORUM
        healed = begin + waited + step.heal_seconds
        fill = self.timeline.fill
        fill(begin, min(begin + waited, end), waiting)
        fill(begin + waited, min(healed, end), State.HEALING)
        again = healed + step.retry_seconds if step.committed else end
        fill(healed, min(again, end), State.RETRYING)
        fill(again, end, State.TRAINING)

    def _is_in_quorum_of(self, step: StepRecord) -> bool:
        """Return whether ``step`` committed in the quorum of the group's last step, with as many participants.

        Then nothing happened between the two: no loss, no heal and no discarded step (other participants), no takeover
        of a lighthouse (another epoch).
        """
        before = self.quorum_id, self.epoch, self.participants
        return step.committed and bool(step.quorum_id) and before == (step.quorum_id, step.epoch, step.participants)

    def set_state(self, replica_id: str, record: StateRecord) -> None:
        if replica_id not in self.ends and record.state in REPORTED_STATES:
            self.timeline.mark(record.t, State(record.state))

    def begin(self, replica_id: str, t: float) -> None:
        """An incarnation joined."""
        self.ends.pop(replica_id, None)
        self.told_to_leave, self.exposed_at = False, 0.0
        self.timeline.mark(t, State.WAITING_QUORUM)

    def end(self, replica_id: str, t: float, state: State) -> None:
        """An incarnation was lost, left, or was asked to leave."""
        self.ends[replica_id] = t
        while len(self.ends) > MAX_ENDS:
            del self.ends[next(iter(self.ends))]
        if replica_id == self.replica_id:
            self.exposed_at = 0.0
            self.timeline.mark(max(t, self.timeline.since), state)

    def forget_loss(self, t: float) -> None:
        """Count the group as gone from ``t`` on, if it is lost."""
        if self.timeline.state is State.LOST:
            self.timeline.mark(max(t, self.timeline.since), State.GONE)

    def forget_after(self, t: float) -> None:
        """See ``Job.forget_after``."""
        self.timeline.forget_after(t)
        self.steps.forget_after(t)
        self.committed_at, self.error_at = min(self.committed_at, t), min(self.error_at, t)
        self.ends = {one: min(end, t) for one, end in self.ends.items()}
        self.slow = deque(((since, until) for since, until in self.slow if since <= t), MAX_SLOW)

    def dump(self) -> dict[str, Any]:
        return {
            **{key: copy(getattr(self, key)) for key in ("name", "replica_id", *PLAIN)},
            "timeline": self.timeline.dump(),
            "steps": self.steps.dump(),
            "recent": [*self.recent],
            "busy": [*self.busy],
            "whole": [*self.whole],
            "slow": [*self.slow],
        }

    @classmethod
    def load(cls, dumped: dict[str, Any]) -> Group:
        group = cls(dumped["name"], dumped["replica_id"], Timeline.load(dumped["timeline"]))
        group.steps.load(dumped["steps"])
        for key in PLAIN:
            setattr(group, key, dumped.get(key, getattr(group, key)))  # an older release had fewer
        group.recent.extend(dumped["recent"])
        group.busy.extend(dumped["busy"])
        group.whole.extend(dumped["whole"])
        group.slow.extend((since, until) for since, until in dumped["slow"])
        return group
