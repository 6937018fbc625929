"""Failures of a job's groups, and when the job and the group recovered from each. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

MAX_FAILURES = 1000
MAX_OPEN = 100
"""Failures that each commit is compared with."""
LATE_RECORD_SECONDS = 30.0
"""A commit before the recovery from a failure may be reported this much later."""


@dataclass(slots=True)
class Failure:
    t: float
    name: str
    """Stable name of the group."""
    cause: str
    quorum_id: int
    committed_at: float | None = None
    """When any group committed a step under a later quorum."""
    recovered_at: float | None = None
    """When the failed group committed a step again."""


class FailureLog:
    def __init__(self) -> None:
        self._all: deque[Failure] = deque(maxlen=MAX_FAILURES)
        self._open: list[Failure] = []
        """Failures that have not recovered, or whose recovery was reported within ``LATE_RECORD_SECONDS``."""

    def __iter__(self) -> Iterator[Failure]:
        """Iterate from the oldest."""
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def add(self, failure: Failure) -> None:
        self._all.append(failure)
        just_now = failure.t - LATE_RECORD_SECONDS
        still_open = [one for one in self._open if one.recovered_at is None or one.recovered_at > just_now]
        self._open = [*still_open, failure][-MAX_OPEN:]

    def on_commit(self, name: str, quorum_id: int, t: float) -> None:
        """Note that the group ``name`` committed a step at ``t``."""
        for failure in self._open:
            if failure.t >= t:
                continue
            if quorum_id > failure.quorum_id and (failure.committed_at is None or t < failure.committed_at):
                failure.committed_at = t
            if failure.name == name and failure.recovered_at is None:
                failure.recovered_at = t

    def forget_after(self, t: float) -> None:
        """See ``Job.forget_after``."""
        kept = [one for one in self._all if max(one.t, one.committed_at or 0.0, one.recovered_at or 0.0) <= t]
        self._all = deque(kept, MAX_FAILURES)
        self._open = [one for one in self._open if one in kept]

    def dump(self) -> list[dict[str, Any]]:
        return [asdict(one) for one in self._all]

    def load(self, dumped: list[dict[str, Any]]) -> None:
        self._all.extend(Failure(**one) for one in dumped)
        self._open = [one for one in self._all if one.recovered_at is None][-MAX_OPEN:]
