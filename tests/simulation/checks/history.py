"""The logs that the simulated lighthouses and groups write, and the checker of real logs over them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from keepstep_chaos.histories.history import History, Report
from keepstep_chaos.histories.records import Place, Record, parse, record_of
from keepstep_lighthouse.jobs.event_log import Happened

if TYPE_CHECKING:
    from tests.simulation.actors.worker import Worker

EVENT_FIELDS = tuple(field.name for field in fields(Happened))
EVENTS = "events.jsonl"
"""The event log of a lighthouse that is alone."""


def report_on(logs: Mapping[str, Sequence[str]]) -> Report:
    """Check ``logs``, lines by file name. Line numbers begin with 1."""
    return _report({path: [parse(line.encode()) for line in lines] for path, lines in logs.items()})


def _report(logs: Mapping[str, Sequence[Record]]) -> Report:
    history = History()
    for path, records in logs.items():
        history.begin_file(path)
        for number, record in enumerate(records, 1):
            history.add(Place(path, number), record)
    return history.report()


class Logs:
    """One event log per lighthouse, over all its restarts, and one step log per group."""

    def __init__(self) -> None:
        self._entries: dict[str, list[dict[str, Any]]] = {}
        self._last_event: dict[str, int] = {}
        self._quorum_of: dict[str, tuple[int, int]] = {}

    @property
    def lines(self) -> dict[str, list[str]]:
        """The lines of all logs, by file name."""
        return {path: [json.dumps(one, default=repr) for one in entries] for path, entries in self._entries.items()}

    def report(self) -> Report:
        """Check all logs. Unlike ``report_on(lines)`` it writes and parses no JSON, which takes most of the time."""
        return _report({path: [record_of(one) for one in entries] for path, entries in self._entries.items()})

    def events(self, kind: str) -> int:
        """The number of entries of ``kind`` in all event logs."""
        return sum(one.get("kind") == kind for entries in self._entries.values() for one in entries)

    def event(self, log: str, happened: Happened) -> None:
        """Append an entry to the event log ``log``."""
        entry = {name: getattr(happened, name) for name in EVENT_FIELDS}
        self._entries.setdefault(log, []).append(entry)
        self._last_event[log] = happened.id

    def last_event(self, log: str) -> int:
        return self._last_event.get(log, 0)

    def step(self, worker: Worker, event: str, **detail: Any) -> None:
        """Append an entry to the step log of ``worker``; ``detail`` as in ``keepstep.step.reporting.step_log``."""
        plan, who = worker.plan, worker.replica_id
        quorum = (plan.epoch, plan.quorum_id) if plan is not None else (0, 0)
        if plan is not None and self._quorum_of.get(who) != quorum:
            self._quorum_of[who] = quorum
            self.step(worker, "quorum", members=list(plan.replica_ids))
        entries = self._entries.setdefault(f"{who}.jsonl", [])
        entry = {"job": "job", "replica_id": who, "group_rank": 0, "n": len(entries) + 1, "event": event}
        entry |= {"step": worker.step, "epoch": quorum[0], "quorum_id": quorum[1], **detail}
        entries.append(entry)
