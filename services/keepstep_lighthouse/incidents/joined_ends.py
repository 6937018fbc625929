"""Join what the lighthouse and the launcher know about the end of a group into one incident. Pure.

The lighthouse knows how it lost the group (entries of its event log), the launcher knows exit code and output
(``Report``). The first of both waits for the other, but not without end, because not every launcher reports. A group
that ended before it connected is known to its launcher only. Facts that arrive later replace the incident: a report
that a broken network delayed, and the return of a group that was silent.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from keepstep_lighthouse.incidents.judgement import CRASHES, Around, Judged, Loss, Report, Verdict, judge, parted
from keepstep_lighthouse.quorum.presence.departures import DRAINED, FAILED, SILENT, STOPPED
from keepstep_mesh.protocol.names import name_of
from keepstep_mesh.protocol.stack_messages import RankStacks

LAUNCHER_SECONDS = 10.0
LEAVING_SECONDS = 30.0
"""How long a loss waits for the report of a launcher; after a goodbye longer, because the process has still to end."""
MAX_OPEN = 200
MAX_DECIDED = 200
"""Limits of ends that wait, and of those that may be replaced; the oldest are dropped."""
REPORTED = {"rank": None, "code": None, "oom_kills": 0, "xids": "", "gpu": ""}
"""Facts of a report that are part of the incident, with their values if no launcher has reported."""
NEVER = float("inf")
Stacks = tuple[RankStacks, ...]


@dataclass(frozen=True, slots=True)
class Incident:
    """An entry ``incident`` of the event log, and what only administrators may read."""

    replica_id: str
    detail: dict[str, Any]
    log: str = ""
    stacks: Stacks = ()


@dataclass(frozen=True, slots=True)
class _End:
    replica_id: str
    at: float
    """Unix time."""
    due: float
    loss: Loss | None = None
    report: Report | None = None
    stacks: Stacks = ()
    came_back: bool = False
    told: bool = False
    """An incident was made of it."""


class Incidents:
    """The incidents of one job that are not decided, or may still change.

    ``now`` is in monotonic seconds, ``now_unix`` in Unix seconds. ``host_of`` returns the machine of a group.
    """

    def __init__(self, host_of: Callable[[str], str]) -> None:
        self._host_of = host_of
        self._here: dict[str, None] = {}
        """Groups that are connected."""
        self._ordered: OrderedDict[str, None] = OrderedDict()
        """Groups that got an order to leave."""
        self._open: OrderedDict[str, _End] = OrderedDict()
        self._decided: OrderedDict[str, _End] = OrderedDict()
        self._crashes: Counter[str] = Counter()
        """By machine."""

    def deadline(self) -> float:
        """Return when to call ``decide_due``."""
        return min((one.due for one in self._open.values()), default=NEVER)

    # ---- facts

    def note(
        self, kind: str, replica_id: str, detail: Mapping[str, Any], stacks: Stacks, now: float, now_unix: float
    ) -> list[Incident]:
        """Note an entry of the event log. ``stacks``: of a group that was lost, if they are known."""
        match kind:
            case "joined":
                self._here[replica_id] = None
                return self._returned(replica_id)
            case "drain":
                self._ordered[replica_id] = None
            case "lost":
                loss = Loss(str(detail["how"]), str(detail["reason"]))
                return self._lost(_End(replica_id, now_unix, now + LAUNCHER_SECONDS, loss, stacks=stacks))
            case "left" if detail["cause"] in (FAILED, STOPPED) or (
                detail["cause"] == DRAINED and replica_id not in self._ordered
            ):
                loss = Loss(str(detail["cause"]), str(detail["reason"]))
                return self._lost(_End(replica_id, now_unix, now + LEAVING_SECONDS, loss))
            case "left" | "moved":
                self._gone(replica_id)
            case "parted":
                judged = parted(str(detail["cause"]), str(detail["reason"]))
                return [self._incident(_End(replica_id, now_unix, now), judged)]
        return []

    def report(self, report: Report, now: float, now_unix: float) -> list[Incident]:
        """A launcher reports an end."""
        waiting = (end for end in self._open.values() if _means(report, end.replica_id))
        noticed = (*waiting, self._decided.get(report.replica_id))
        known = next((end for end in noticed if end is not None and end.report is None), None)
        if known is not None:
            return self._decide(replace(known, report=report))
        end = _End(report.replica_id, now_unix - report.seconds_ago, now + LAUNCHER_SECONDS, report=report)
        is_here = any(_means(report, one) for one in self._here)
        return self._wait(end) if is_here else self._decide(end)

    def decide_due(self, now: float) -> list[Incident]:
        """Decide the ends that have waited long enough."""
        due = [end for end in self._open.values() if now >= end.due]
        return [incident for end in due for incident in self._decide(end)]

    # ---- ends

    def _lost(self, end: _End) -> list[Incident]:
        replica_id = end.replica_id
        self._gone(replica_id)
        told = self._open.get(replica_id) or self._open.get(name_of(replica_id)) or self._decided.get(replica_id)
        if told is None or told.loss is not None:
            return self._wait(end)
        self._open.pop(told.replica_id, None)
        return self._decide(replace(end, at=told.at, report=told.report, told=told.told))

    def _returned(self, replica_id: str) -> list[Incident]:
        end = self._open.get(replica_id) or self._decided.get(replica_id)
        if end is None or end.loss is None or end.loss.how != SILENT or end.report is not None:
            return []
        return self._decide(replace(end, came_back=True))

    def _gone(self, replica_id: str) -> None:
        self._here.pop(replica_id, None)
        self._ordered.pop(replica_id, None)

    def _wait(self, end: _End) -> list[Incident]:
        replaced = self._open.pop(end.replica_id, None)
        made = [] if replaced is None else self._decide(replaced)
        self._open[end.replica_id] = end
        return made if len(self._open) <= MAX_OPEN else made + self._decide(next(iter(self._open.values())))

    def _decide(self, end: _End) -> list[Incident]:
        host = self._host(end.replica_id, end.report)
        judged = judge(end.report, end.loss, self._around(end, host))
        if judged is None and end.told:
            judged = Judged(Verdict.ORDERED, ("its launcher had an order to end it",))
        self._open.pop(end.replica_id, None)
        self._decided[end.replica_id] = replace(end, told=judged is not None)
        self._decided.move_to_end(end.replica_id)
        if len(self._decided) > MAX_DECIDED:
            self._decided.popitem(last=False)
        if judged is None:
            return []
        self._crashes[host] += end.report is not None and end.report.signal in CRASHES
        return [self._incident(end, judged)]

    def _around(self, end: _End, host: str) -> Around:
        others = [self._host(one, None) for one in self._here if one != end.replica_id]
        return Around(
            end.came_back,
            bool(host) and host in others,
            self._crashes[host],
            self._crashes.total() - self._crashes[host],
            any(one != host for one in others),
        )

    def _host(self, replica_id: str, report: Report | None) -> str:
        return (report.host if report is not None else "") or self._host_of(replica_id)

    def _incident(self, end: _End, judged: Judged) -> Incident:
        report = end.report
        detail = {
            "verdict": judged.verdict.value,
            "reason": "; ".join(judged.evidence),
            "evidence": [*judged.evidence],
            "host": self._host(end.replica_id, report),
            "at": end.at,
            **{name: getattr(report, name, unknown) for name, unknown in REPORTED.items()},
        }
        return Incident(end.replica_id, detail, "" if report is None else report.log, end.stacks)


def _means(report: Report, replica_id: str) -> bool:
    return report.replica_id in (replica_id, name_of(replica_id))
