"""Which jobs expire, and when. Pure.

A job expires when nobody used it for the ``job_ttl`` of its policy. It is in use while a session is open; an operator's
order counts as use too. It does not expire while a group may come back (reconnect grace, takeover grace). When it was
last used is not stored: a new leader counts from the beginning of its term.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

NEVER = float("inf")


@dataclass(frozen=True, slots=True)
class JobUse:
    """Times in seconds, of one clock."""

    job: str
    ttl: float
    """0: it never expires."""
    sessions: int
    used_at: float
    """When its last session ended, or its last order came."""
    awaited: bool = False
    """A group without a session may come back."""


def due_at(use: JobUse) -> float:
    """When the job is to be looked at; ``NEVER`` while it is in use."""
    return NEVER if use.sessions or not use.ttl else use.used_at + use.ttl


def expired(uses: Iterable[JobUse], now: float) -> list[str]:
    """Names of the jobs that have expired, the longest unused first."""
    found = [use for use in uses if due_at(use) <= now and not use.awaited]
    return [use.job for use in sorted(found, key=lambda use: use.used_at)]


def next_due(uses: Iterable[JobUse]) -> float:
    return min(map(due_at, uses), default=NEVER)
