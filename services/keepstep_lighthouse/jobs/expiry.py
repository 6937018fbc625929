"""Expiry of unused jobs, and the jobs that make room for a new one. Pure.

A job expires when it was unused for the ``job_ttl`` of its policy. It is in use while a session is open; an operator's
order counts as use too. It does not expire while a group may reconnect (reconnect grace, takeover grace). The time of
the last use is not stored: a new leader counts from the beginning of its term.

A lighthouse with as many jobs as it may have deletes one for a new job: an expired one, or else one whose groups have
finished, unused for ``OVER_SECONDS``. It never deletes a job that may go on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

NEVER = float("inf")
OVER_SECONDS = 3600.0
"""Time for which a finished job is shown, even if its place is needed."""


@dataclass(frozen=True, slots=True)
class JobUse:
    """Times in seconds, of one clock."""

    job: str
    ttl: float
    """0: it never expires."""
    sessions: int
    used_at: float
    """When its last session ended, or its last order arrived."""
    awaited: bool = False
    """A group without a session may reconnect."""
    over: bool = False
    """All its groups have finished."""


def due_at(use: JobUse) -> float:
    """Return when the job expires; ``NEVER`` while it is in use."""
    return NEVER if use.sessions or not use.ttl else use.used_at + use.ttl


def expired(uses: Iterable[JobUse], now: float) -> list[str]:
    """Return the names of expired jobs, the longest unused first."""
    found = [use for use in uses if due_at(use) <= now and not use.awaited]
    return [use.job for use in sorted(found, key=_used_at)]


def replaceable(uses: Iterable[JobUse], now: float) -> str | None:
    """Return the job that makes room for a new one: the longest unused of the expired ones, or of those that are over.

    None: no job may.
    """
    unused = [use for use in uses if use.ttl and not use.sessions and not use.awaited]
    chosen = [use for use in unused if due_at(use) <= now]
    chosen = chosen or [use for use in unused if use.over and now - use.used_at >= OVER_SECONDS]
    return min(chosen, key=_used_at).job if chosen else None


def _used_at(use: JobUse) -> float:
    return use.used_at


def next_due(uses: Iterable[JobUse]) -> float:
    return min(map(due_at, uses), default=NEVER)
