"""Check the logs of lighthouses and trainers against the invariants of a run. Pure: records in, violations out.

    history = History()
    history.begin_file(log)                              for each file, a rotated one before its successor
    history.add(place, record)                           for each line, or
    history.unreadable(place, why, whole=...)            for a line that is not a record
    report = history.report()

The check ignores all times, because clocks of machines differ. It derives the order from numbers that only grow: lines
of one log are in order; epochs and quorum_ids grow over all lighthouses; a group asks for a quorum with the step that
it has reached. ``RULES`` lists the invariants: ``logs`` checks those of one log while it is read, ``jobs`` those
between logs at the end. Memory grows with changes of quorums and groups, and not with steps: consecutive steps of one
process under one quorum are one ``Run``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from keepstep_chaos.histories.jobs import Facts, JobHistory
from keepstep_chaos.histories.logs import EventLogCheck
from keepstep_chaos.histories.records import EventRecord, Place, Record, StepRecord
from keepstep_chaos.histories.rules import RULES, Rule, Violation, Violations


@dataclass(slots=True)
class Report:
    """Result of a check. ``violations`` has the first of each rule; ``counts`` has the number of all."""

    violations: list[Violation]
    counts: Counter[str]
    records: int
    event_logs: int
    step_logs: int
    """Number of processes that wrote steps."""
    epochs: int
    jobs: dict[str, Facts]
    not_covered: list[str] = field(default_factory=list)
    """Sentences that name the parts that were not checked, and the log that is missing."""

    @property
    def fine(self) -> bool:
        return not self.violations

    @property
    def checked(self) -> list[Rule]:
        """The rules for which the logs suffice."""
        read = {"event log": self.event_logs, "step log": self.step_logs, "": 1}
        return [rule for rule in RULES.values() if read[rule.needs]]

    def json(self) -> dict[str, Any]:
        return {
            "fine": self.fine,
            "violations": [one.json() for one in self.violations],
            "violations_by_rule": dict(self.counts),
            "records": self.records,
            "event_logs": self.event_logs,
            "step_logs": self.step_logs,
            "epochs": self.epochs,
            "jobs": {name: asdict(job) for name, job in self.jobs.items()},
            "not_covered": self.not_covered,
            "checked": {rule.name: rule.holds for rule in self.checked},
        }


class History:
    """The logs of one run. Files may come in any order, the lines of a file in theirs."""

    def __init__(self) -> None:
        self._violations = Violations()
        self._jobs: dict[str, JobHistory] = {}
        self._event_logs: dict[str, EventLogCheck] = {}
        self._owners: dict[int, tuple[str, Place]] = {}
        self._log = ""
        self._unread: tuple[Place, str] | None = None
        """A line that is not a record, until the next line shows whether a kill and a restart explain it."""
        self._cut_off: list[Place] = []
        self._records = 0

    def begin_file(self, log: str) -> None:
        """Begin a file. ``log``: name of the log; the same for all parts of a rotated log."""
        self._explain(None)
        self._log = log

    def add(self, place: Place, record: Record) -> None:
        self._explain(record)
        self._records += 1
        if isinstance(record, StepRecord):
            self._job(record.job).process(record.replica_id, record.group_rank).add(place, record)
            return
        log = self._event_logs.get(self._log)
        if log is None:
            log = self._event_logs[self._log] = EventLogCheck(self._log, self._violations)
        log.add(place, record)
        self._owned(record.epoch, log.owner, place)
        if record.job:
            self._job(record.job).add_event(place, record)

    def unreadable(self, place: Place, why: str, *, whole: bool) -> None:
        """Add a line that is not a record. ``whole``: it has a line end; otherwise a kill may have cut it off."""
        self._explain(None)
        if whole:
            self._unread = place, why
        else:
            self._cut_off.append(place)

    def _explain(self, record: Record | None) -> None:
        """Decide on the pending line: a restarted lighthouse ends a line that a kill cut off, and begins a term."""
        if self._unread is not None:
            place, why = self._unread
            self._unread = None
            if isinstance(record, EventRecord) and record.kind == "term":
                self._cut_off.append(place)
            else:
                self._violations.add("unreadable", "", f"the line is not a record: {why}", place)

    def _job(self, name: str) -> JobHistory:
        job = self._jobs.get(name)
        if job is None:
            job = self._jobs[name] = JobHistory(name, self._violations)
        return job

    def _owned(self, epoch: int, owner: str, place: Place) -> None:
        known = self._owners.get(epoch)
        if known is None:
            self._owners[epoch] = owner, place
        elif known[0] != owner:
            self._violations.add(
                "one_owner", "", f"epoch {epoch} is used by {known[0]} and by {owner}", known[1], place
            )

    def report(self) -> Report:
        self._explain(None)
        for job in self._jobs.values():
            job.check({epoch: owner for epoch, (owner, _) in self._owners.items()})
        return Report(
            violations=self._violations.kept,
            counts=self._violations.counts,
            records=self._records,
            event_logs=len(self._event_logs),
            step_logs=sum(len(job.processes) for job in self._jobs.values()),
            epochs=len(self._owners),
            jobs={name: job.facts() for name, job in sorted(self._jobs.items())},
            not_covered=self._not_covered(),
        )

    def _not_covered(self) -> list[str]:
        event_logs, step_logs = bool(self._event_logs), any(job.processes for job in self._jobs.values())
        missing = []
        if not event_logs:
            missing.append(_missing("event log", "of a lighthouse: start it with --event-log FILE"))
        if not step_logs:
            missing.append(_missing("step log", "of a trainer: start it with KEEPSTEP_STEP_LOG=FILE"))
        missing += [f"{log.name} begins in the middle" for log in self._event_logs.values() if log.headless]
        missing += [f"{place} is cut off in the middle, as a kill leaves it" for place in self._cut_off]
        for job in self._jobs.values():
            missing += job.not_covered(event_logs=event_logs, step_logs=step_logs)
        return missing


def _missing(kind: str, advice: str) -> str:
    unchecked = ", ".join(rule.name for rule in RULES.values() if rule.needs == kind)
    return f"no {kind} {advice}. Not checked without it: {unchecked}"
