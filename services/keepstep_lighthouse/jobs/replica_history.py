"""Facts about the groups of a job that outlive an incarnation: restarts, host, versions, last error. Pure.

They come from hellos and from the event log of the job, since this lighthouse leads.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Collection
from dataclasses import dataclass, replace

from keepstep_lighthouse.quorum.events import LogEntry
from keepstep_lighthouse.quorum.views.replicas import ReplicaView
from keepstep_mesh.protocol.names import name_of

MAX_NAMES = 4000
"""Limit of remembered groups; the ones that were seen last are kept."""
MAX_FACT = 200
"""Characters of a host or version that are kept."""
MARKS = 21
MARK_SECONDS = 0.5
"""The rate of steps is measured over the last ``MARKS`` marks, at least ``MARK_SECONDS`` apart."""
ERRORS = {
    "lost": "lost",
    "failed": "failed",
    "heal_failed": "heal failed",
    "denied": "request denied",
    "refused": "refused",
}
"""Kinds of errors of a group, and how their reason begins: kinds of events, and a script that ended with an error."""


@dataclass(slots=True)
class _Facts:
    incarnation: str = ""
    restarts: int = 0
    host: str = ""
    runtime: str = ""
    error: str = ""
    """Kind of the last error; empty: none."""
    reason: str = ""
    times: int = 0
    """Errors of that kind in a row."""
    error_at: float = 0.0


class ReplicaHistory:
    """Times are monotonic seconds."""

    def __init__(self) -> None:
        self._facts: OrderedDict[str, _Facts] = OrderedDict()
        self._runtimes: Counter[str] = Counter()
        """Number of remembered groups, by versions."""

    def arrived(self, replica_id: str, host: str, runtime: str) -> None:
        """A hello was accepted. ``runtime``: versions of Python and torch; empty: unknown."""
        facts = self._of(replica_id)
        facts.restarts += facts.incarnation not in ("", replica_id)
        self._count(facts.runtime, -1)
        facts.incarnation, facts.host, facts.runtime = replica_id, host[:MAX_FACT], runtime[:MAX_FACT]
        self._count(facts.runtime, 1)

    def add(self, entry: LogEntry, now: float) -> None:
        """Note an entry of the event log."""
        if entry.kind == "healed":
            self._of(entry.replica_id).error = ""
            return
        kind = entry.detail.get("cause") if entry.kind == "left" else entry.kind
        if kind in ERRORS:
            facts = self._of(entry.replica_id)
            facts.times = facts.times + 1 if facts.error == kind else 1
            facts.error, facts.reason, facts.error_at = str(kind), str(entry.detail.get("reason", "")), now

    def host_of(self, replica_id: str) -> str:
        """Return the name of the machine of a group; empty: unknown."""
        facts = self._facts.get(name_of(replica_id)) or self._facts.get(replica_id)
        return facts.host if facts is not None else ""

    def unlike_others(self, replica_id: str, connected: Collection[str]) -> str:
        """Return the versions that most of the ``connected`` groups have, if this one has others; else empty.

        ``connected``: their names, each once.
        """
        own = self._of(replica_id).runtime
        gone = max(0, len(self._facts) - len(connected))
        if 2 * (self._runtimes[own] - gone) > len(connected):  # no need to look at all
            return ""
        name = name_of(replica_id)
        others = (self._facts[one] for one in connected if one != name and one in self._facts)
        counts = Counter(one.runtime for one in others if one.runtime)
        usual = counts.most_common(1)[0][0] if counts else own
        return usual if own and own != usual else ""

    def with_facts(self, view: ReplicaView, now: float) -> ReplicaView:
        """Return ``view`` with the facts about its group."""
        facts = self._facts.get(view.name)
        if facts is None:
            return view
        times = f" {facts.times} times" if facts.times > 1 else ""
        known = replace(view, restarts=facts.restarts, host=facts.host, runtime=facts.runtime)
        if not facts.error:
            return known
        return replace(
            known,
            last_error=f"{ERRORS[facts.error]}{times}: {facts.reason}",
            last_error_seconds_ago=max(0.0, now - facts.error_at),
        )

    def _count(self, runtime: str, by: int) -> None:
        self._runtimes[runtime] += by
        if not self._runtimes[runtime]:
            del self._runtimes[runtime]

    def _of(self, replica_id: str) -> _Facts:
        name = name_of(replica_id)
        if (facts := self._facts.get(name)) is None:
            facts = self._facts[name] = _Facts()
            self._count(facts.runtime, 1)
            if len(self._facts) > MAX_NAMES:
                _, gone = self._facts.popitem(last=False)
                self._count(gone.runtime, -1)
        self._facts.move_to_end(name)
        return facts


class StepRate:
    """The rate at which a job commits steps. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._marks: deque[tuple[float, int]] = deque(maxlen=MARKS)
        self._steps = 0
        self.committed_at: float | None = None
        """Time of the last commit; None: none yet."""

    def add(self, steps: int, now: float) -> None:
        """Note that the job committed ``steps`` more steps."""
        self._steps += steps
        self.committed_at = now
        if not self._marks or now - self._marks[-1][0] >= MARK_SECONDS:
            self._marks.append((now, self._steps))

    def per_second(self, now: float) -> float | None:
        """Return the rate; 0 if the next step takes much longer than those before; None: too few steps."""
        if len(self._marks) < 2 or self.committed_at is None:
            return None
        (since, before), (until, after) = self._marks[0], self._marks[-1]
        rate = (after - before) / (until - since)
        is_late = (now - self.committed_at) * rate > 5 and now - self.committed_at > 5
        return 0.0 if is_late else rate
