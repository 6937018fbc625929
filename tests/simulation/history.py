"""The logs that the simulated lighthouses and groups would write, as lines, for the checker of real ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from keepstep_history.history import History, Report
from keepstep_history.records import Place, parse
from keepstep_lighthouse.jobs.event_log import Happened
from keepstep_lighthouse.quorum.events import LogEntry

if TYPE_CHECKING:
    from tests.simulation.lighthouse import Lighthouse
    from tests.simulation.worker import Worker

EVENTS = "events.jsonl"


def report_on(logs: Mapping[str, Sequence[str]]) -> Report:
    """``logs``: lines by file. Line numbers begin with 1."""
    history = History()
    for path, lines in logs.items():
        history.begin_file(path)
        for number, line in enumerate(lines, 1):
            history.add(Place(path, number), parse(line.encode()))
    return history.report()


class Logs:
    """One event log over all restarts, or one for each of several lighthouses; and one step log a group."""

    def __init__(self) -> None:
        self.lines: dict[str, list[str]] = {EVENTS: []}
        self._lighthouse: Lighthouse | None = None
        self._terms = self._events = 0
        self._in: dict[str, tuple[int, int]] = {}
        self._last: dict[str, int] = {}

    def entry(self, lighthouse: Lighthouse, entry: LogEntry, job: str = "job") -> None:
        if lighthouse is not self._lighthouse:
            self._lighthouse, self._terms = lighthouse, self._terms + 1
            self._events = max(self._events, lighthouse.epoch << 32)
            self.entry(lighthouse, LogEntry("term", "", {"owner": f"lighthouse {self._terms}"}), "")
        self._events += 1
        happened = Happened(self._events, 0.0, job, lighthouse.epoch, entry.kind, entry.replica_id, entry.detail)
        self.lines[EVENTS].append(happened.json())

    def event(self, log: str, happened: Happened) -> None:
        """As a lighthouse writes it into its own log, ``log``."""
        self.lines.setdefault(f"{log}.jsonl", []).append(happened.json())
        self._last[log] = happened.id

    def last_event(self, log: str) -> int:
        return self._last.get(log, 0)

    def step(self, worker: Worker, event: str, **detail: Any) -> None:
        """``detail`` as ``keepstep.step.step_log`` says it; the quorum is that of the worker's plan."""
        plan, who = worker.plan, worker.replica_id
        answer = (plan.epoch, plan.quorum_id) if plan is not None else (0, 0)
        if plan is not None and self._in.get(who) != answer:
            self._in[who] = answer
            self.step(worker, "quorum", members=plan.replica_ids)
        lines = self.lines.setdefault(f"{who}.jsonl", [])
        line = {"job": "job", "replica_id": who, "group_rank": 0, "n": len(lines) + 1, "event": event}
        line |= {"step": worker.step, "epoch": answer[0], "quorum_id": answer[1]}
        lines.append(json.dumps(line | detail))
