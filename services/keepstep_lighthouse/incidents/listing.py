"""The incidents of a job as its event log has them, and the machines that fail repeatedly. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

from keepstep_lighthouse.incidents.joined_ends import REPORTED
from keepstep_lighthouse.incidents.judgement import Verdict
from keepstep_mesh.exit_codes import describe_exit
from keepstep_mesh.protocol.names import name_of

KIND = "incident"
"""Kind of the entries of the event log."""
MAX_LISTED = 100
AGAINST = (Verdict.MACHINE.value, Verdict.NETWORK.value, Verdict.UNKNOWN.value)
"""Verdicts that count against a machine, the gravest first."""
LEAST_FAILURES = 2
"""Number of incidents from which a machine is listed."""


class Entry(Protocol):
    """An entry of the event log."""

    @property
    def id(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def replica_id(self) -> str: ...
    @property
    def detail(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class IncidentView:
    id: int
    """Number of its event."""
    time: float
    """When the group ended; Unix seconds."""
    replica_id: str
    """Incarnation, or the stable name of a group that had not connected."""
    name: str
    verdict: str
    """``script``, ``machine``, ``network``, ``out of memory``, ``preemption`` or ``unknown``."""
    evidence: tuple[str, ...]
    """Sentences, the gravest first."""
    host: str
    """Name of its machine; empty: unknown."""
    rank: int | None
    """The rank that ended first; None: no launcher told."""
    code: int | None
    """Its exit code; negative: a signal."""
    exit: str
    """The code in words: ``was killed by SIGKILL``; empty: no launcher told."""
    oom_kills: int
    xids: str
    """XID errors of its GPUs, with blanks between."""
    gpu: str
    """Whether XID errors could be read."""


@dataclass(frozen=True, slots=True)
class HostView:
    """A machine that fails repeatedly."""

    host: str
    failures: int
    """Incidents that count against it."""
    verdicts: dict[str, int]
    """All incidents of its groups, by verdict."""


def listed(entries: Iterable[Entry]) -> list[IncidentView]:
    """Return the incidents among ``entries``, the newest first. Of one that was replaced, the last form counts."""
    latest = {(one.replica_id, one.detail["at"]): view(one) for one in entries if one.kind == KIND}
    found = (one for one in latest.values() if one.verdict != Verdict.ORDERED.value)
    return sorted(found, key=lambda one: (one.time, one.id), reverse=True)[:MAX_LISTED]


def view(entry: Entry) -> IncidentView:
    """Return the incident of an entry."""
    detail = entry.detail
    return IncidentView(
        id=entry.id,
        time=detail["at"],
        replica_id=entry.replica_id,
        name=name_of(entry.replica_id),
        evidence=tuple(detail["evidence"]),
        exit="" if detail["code"] is None else describe_exit(detail["code"]),
        **{name: detail[name] for name in ("verdict", "host", *REPORTED)},
    )


def ranked(incidents: Iterable[IncidentView]) -> list[HostView]:
    """Return the machines with at least ``LEAST_FAILURES`` incidents that count against them, the worst first."""
    counts: dict[str, Counter[str]] = {}
    for one in incidents:
        if one.host:
            counts.setdefault(one.host, Counter())[one.verdict] += 1
    found = [HostView(host, sum(count[one] for one in AGAINST), dict(count)) for host, count in counts.items()]
    worst_first = sorted(found, key=lambda one: (*(-one.verdicts.get(name, 0) for name in AGAINST), one.host))
    return [one for one in worst_first if one.failures >= LEAST_FAILURES]
