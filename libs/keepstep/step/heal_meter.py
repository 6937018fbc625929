"""How far a heal is, how fast, and how long it will take: what the lighthouse is told and what is logged. Pure."""

from __future__ import annotations

from keepstep_mesh.protocol.messages import MAX_HEAL_ERROR, Healing
from keepstep_mesh.telemetry.throughput import ThroughputMeter

REPORT_SECONDS = 0.25
"""Between two reports to the lighthouse."""
LONG_SECONDS = 1.0
"""A heal that takes longer says in the log that it began."""
LOG_SECONDS = 5.0
"""Between two lines in the log after that."""
MIB = 1 << 20


class HealMeter:
    """Of one heal of one rank, begun at ``now`` (monotonic seconds).

    Args:
        step: whose state is taken over.
        source: replica_id that it comes from, or "".
    """

    def __init__(self, step: int, source: str, now: float) -> None:
        self._step = step
        self._source = source
        self._began = now
        self._moved = (0, 0)
        self._pace = ThroughputMeter(now)
        self._next_line = LONG_SECONDS

    @property
    def bytes_done(self) -> int:
        return self._moved[0]

    def moved(self, done: int, total: int) -> None:
        """See ``transport.Progress``. From any thread."""
        self._moved = done, total

    def report(self, via: str, now: float) -> Healing:
        done, total = self._moved
        self._pace.count(done, now)
        seconds = now - self._began
        return Healing(done, total, self._pace.rate(now), self._step, self._source, via, seconds)

    def last_report(self, via: str, error: str, now: float) -> Healing:
        """With the rate of all of it. From any thread. ``error``: why it failed, or ""."""
        done, total = self._moved
        seconds = now - self._began
        rate = done / max(seconds, 1e-6)
        return Healing(
            *(done, total, rate, self._step, self._source, via, seconds), ended=True, error=error[:MAX_HEAL_ERROR]
        )

    def line(self, told: Healing) -> str | None:
        """The event to be logged with ``log_fields(told)``; None: nothing now."""
        if told.seconds < self._next_line:
            return None
        event = "heal began" if self._next_line == LONG_SECONDS else "healing"
        self._next_line = told.seconds + LOG_SECONDS
        return event


def log_fields(told: Healing) -> dict[str, object]:
    left = told.seconds_left
    return {
        "step": told.step,
        "source": told.source,
        "via": told.via,
        "percent": round(100 * told.bytes_done / told.bytes_total) if told.bytes_total else None,
        "bytes_total": told.bytes_total,
        "mib_per_second": round(told.bytes_per_second / MIB, 1),
        "seconds_left": None if left is None else round(left, 1),
    }
