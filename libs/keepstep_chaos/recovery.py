"""Follow which targets are down, what each fault cost, and whether the job stands still. Pure: time is an argument.

Times are Unix times in seconds, as in the logs. A group that was hit is down until it commits a step after the fault,
or stands by as a spare; a service, until it answers. A service that this machine cannot reach (``unseen``) is down only
during its faults. ``wedged_seconds`` counts while enough targets are untouched and
alive, and no step commits.

``commit_gap_seconds`` of a fault is the longest time between two commits of the job, of those that it may have delayed:
from the last commit before it to the first one after its target works again.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from keepstep_chaos.pace import Pace
from keepstep_chaos.vocabulary import Fault, Role, Target


@dataclass(slots=True)
class Cost:
    """One fault and what it cost. Times are seconds; None: not seen before the end of the run."""

    fault: Fault
    began: float
    ended: float | None = None
    """Unix time at which the target was left alone again."""
    next_commit_seconds: float | None = None
    """From its beginning to the next commit of another group, or of any group if it hit none."""
    recovered_seconds: float | None = None
    """From its beginning until the target worked again."""
    detected_seconds: float | None = None
    """From its beginning until the lighthouse noted that its group is missing or leaves; None: it did not."""
    commit_gap_seconds: float | None = None
    """None: no step committed since."""
    discarded: int = 0
    """Steps that groups discarded after it, until the next fault."""
    retried: int = 0
    went_back: int = 0
    """Committed steps that the job gave up after it, until the next fault."""
    lost: list[str] = field(default_factory=list)
    """Groups that no fault had hit, and which were lost or evicted."""
    failed: str = ""
    """Why it could not be injected; empty: it was."""

    def json(self) -> dict[str, Any]:
        fault = self.fault
        return {
            "number": fault.number,
            "kind": fault.kind.name,
            "role": fault.target.role,
            "target": fault.target.name,
            "seconds": round(fault.seconds, 3),
            "began": self.began,
            "ended": self.ended,
            "detected_seconds": self.detected_seconds,
            "next_commit_seconds": self.next_commit_seconds,
            "recovered_seconds": self.recovered_seconds,
            "commit_gap_seconds": self.commit_gap_seconds,
            "discarded": self.discarded,
            "retried": self.retried,
            "went_back": self.went_back,
            "lost": self.lost,
            "failed": self.failed,
        }


class Recovery:
    """State of all targets. ``began``: Unix time of the start."""

    def __init__(self, targets: Collection[Target], min_groups: int, began: float) -> None:
        self._targets = tuple(targets)
        self._min_groups = min_groups
        self._quiet_since = began
        self._open: dict[Target, Cost] = {}
        """The fault of each target that is down."""
        self._acting: dict[int, Cost] = {}
        """Faults that are being injected, by number."""
        self._awaiting: list[Cost] = []
        """Faults without a commit since."""
        self._measured: list[Cost] = []
        """Faults that may delay the next commit."""
        self._last_commit = began
        self.unseen: frozenset[Target] = frozenset()
        """Targets whose recovery cannot be seen."""
        self.pace = Pace()
        self.costs: list[Cost] = []
        self.commits = 0
        """Different steps that were committed."""
        self.highest_step = 0

    # ---- faults

    def begin(self, fault: Fault, now: float) -> Cost:
        cost = Cost(fault, now)
        self.costs.append(cost)
        self._acting[fault.number] = cost
        self._awaiting.append(cost)
        self._measured.append(cost)
        if fault.kind.takes_away and fault.target not in self.unseen:
            self._open[fault.target] = cost
        return cost

    def end(self, fault: Fault, now: float, failed: str = "") -> None:
        """The injection is over. ``failed``: why the target was not hit."""
        cost = self._acting.pop(fault.number)
        cost.ended, cost.failed = now, failed
        if failed and self._open.get(fault.target) is cost:
            del self._open[fault.target]
        for costs in (self._awaiting, self._measured):
            if failed and cost in costs:
                costs.remove(cost)
        if not fault.kind.takes_away and not failed:
            cost.recovered_seconds = now - cost.began

    @property
    def down(self) -> frozenset[Target]:
        """Targets that are hit, or have not recovered."""
        return frozenset(self._open) | {cost.fault.target for cost in self._acting.values()}

    @property
    def acting(self) -> frozenset[Target]:
        return frozenset(cost.fault.target for cost in self._acting.values())

    def waits_for(self, role: Role) -> list[Target]:
        """Return targets of this role that are left alone again and have not recovered."""
        return [target for target, cost in self._open.items() if target.role == role and cost.ended is not None]

    # ---- observations

    def committed(self, group: Target, step: int, at: float) -> None:
        self._quiet_since = max(self._quiet_since, at)
        self.pace.committed(str(group), step, at)
        if step > self.highest_step:
            self.commits, self.highest_step = self.commits + 1, step
            self._note_gap(at)
        for cost in [one for one in self._awaiting if at > one.began and one.fault.target != group]:
            cost.next_commit_seconds = at - cost.began
            self._awaiting.remove(cost)
        self.works(group, at)

    def _note_gap(self, at: float) -> None:
        gap, self._last_commit = max(0.0, at - self._last_commit), max(at, self._last_commit)
        for cost in [one for one in self._measured if at > one.began]:
            cost.commit_gap_seconds = max(gap, cost.commit_gap_seconds or 0.0)
            works = cost.recovered_seconds is not None and at > cost.began + cost.recovered_seconds
            if works or (cost.fault.target in self.unseen and cost.ended is not None and at > cost.ended):
                self._measured.remove(cost)

    def works(self, target: Target, at: float) -> None:
        """``target`` did work at this time: a group committed or stood by, a service answered."""
        cost = self._open.get(target)
        if cost is not None and cost.ended is not None and at > cost.ended:
            cost.recovered_seconds = at - cost.began
            del self._open[target]

    def discarded(self, *, retried: bool) -> None:
        """A group discarded or retried a step."""
        if self.costs:
            cost = self.costs[-1]
            cost.retried, cost.discarded = cost.retried + retried, cost.discarded + (not retried)

    def went_back(self, steps: int) -> None:
        """The job gave up committed steps."""
        if self.costs:
            self.costs[-1].went_back += steps

    def detected(self, group: Target, at: float) -> None:
        """The lighthouse noted that ``group`` is missing, or leaves."""
        cost = self._open.get(group)
        if cost is not None and cost.detected_seconds is None and at >= cost.began:
            cost.detected_seconds = at - cost.began

    def lost(self, group: Target, why: str) -> None:
        """The lighthouse lost or evicted ``group``."""
        if group not in self.down and self.costs:
            self.costs[-1].lost.append(f"{group}: {why}")

    def stuck(self, now: float, seconds: float) -> list[Target]:
        """Return targets that have not recovered ``seconds`` after the end of their fault."""
        return [target for target, cost in self._open.items() if cost.ended is not None and now - cost.ended > seconds]

    # ---- the watchdog

    def wedged_seconds(self, now: float, alive: Collection[Target]) -> float:
        """Return for how long no step has committed while enough targets were able to."""
        able = set(alive) - self.acting
        groups = sum(target.role == Role.GROUP for target in able)
        needed = [
            role for role in (Role.LIGHTHOUSE, Role.STORE) if any(target.role == role for target in self._targets)
        ]
        if groups < self._min_groups or any(all(target.role != role for target in able) for role in needed):
            self._quiet_since = max(self._quiet_since, now)
        return max(0.0, now - self._quiet_since)
