"""Measure the progress and rate of a heal, for the lighthouse and for the log. Pure."""

from __future__ import annotations

from keepstep_mesh.config.log_limiter import LogLimiter
from keepstep_mesh.protocol.messages import MAX_HEAL_ERROR, Healing
from keepstep_mesh.telemetry.throughput import ThroughputMeter

REPORT_SECONDS = 0.25
"""Time between two reports to the lighthouse."""
LONG_SECONDS = 1.0
"""The start of a heal that takes longer is logged."""
MIB = 1 << 20


class HealMeter:
    """Measures one heal of one rank. All times are monotonic seconds.

    Args:
        step: of the state that the rank loads.
        source: replica_id of the group that sends it, or "".
        now: start of the heal.
    """

    def __init__(self, step: int, source: str, now: float) -> None:
        self._step = step
        self._source = source
        self._began = now
        self._moved = (0, 0)
        self._throughput = ThroughputMeter(now)
        self._lines = LogLimiter(seconds=5.0)
        self._event = "heal began"
        """The event of the next line."""

    @property
    def bytes_done(self) -> int:
        return self._moved[0]

    def moved(self, done: int, total: int) -> None:
        """Note the bytes received so far and in all (``exchange.Progress``). From any thread."""
        self._moved = done, total

    def report(self, via: str, now: float) -> Healing:
        """Return the progress at ``now``, with the rate of the last seconds."""
        done, total = self._moved
        self._throughput.count(done, now)
        seconds = now - self._began
        return Healing(done, total, self._throughput.rate(now), self._step, self._source, via, seconds)

    def last_report(self, via: str, error: str, now: float) -> Healing:
        """Return the end of the heal, with the average rate. From any thread. ``error``: why it failed, or ""."""
        done, total = self._moved
        seconds = now - self._began
        rate = done / max(seconds, 1e-6)
        return Healing(
            *(done, total, rate, self._step, self._source, via, seconds), ended=True, error=error[:MAX_HEAL_ERROR]
        )

    def line(self, report: Healing) -> str | None:
        """Return the event to log now, with ``log_fields(report)``; None: log nothing."""
        if report.seconds < LONG_SECONDS or not self._lines.allows(report.seconds):
            return None
        event, self._event = self._event, "healing"
        return event


def log_fields(report: Healing) -> dict[str, object]:
    """Return the fields of a log line about the progress of a heal."""
    left = report.seconds_left
    return {
        "step": report.step,
        "source": report.source,
        "via": report.via,
        "percent": round(100 * report.bytes_done / report.bytes_total) if report.bytes_total else None,
        "bytes_total": report.bytes_total,
        "mib_per_second": round(report.bytes_per_second / MIB, 1),
        "seconds_left": None if left is None else round(left, 1),
    }
