"""Expiry of unused jobs. Pure.

A job expires when it was unused for the ``job_ttl`` of its policy. It is in use while a session is open; an operator's
order counts as use too. It does not expire while a group may reconnect (reconnect grace, takeover grace). The time of
the last use is not stored: a new leader counts from the beginning of its term.
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
    """When its last session ended, or its last order arrived."""
    awaited: bool = False
    """A group without a session may reconnect."""


def due_at(use: JobUse) -> float:
    """Return when the job expires; ``NEVER`` while it is in use."""
    return NEVER if use.sessions or not use.ttl else use.used_at + use.ttl


def expired(uses: Iterable[JobUse], now: float) -> list[str]:
    """Return the names of expired jobs, the longest unused first."""
    found = [use for use in uses if due_at(use) <= now and not use.awaited]
    return [use.job for use in sorted(found, key=lambda use: use.used_at)]


def next_due(uses: Iterable[JobUse]) -> float:
    return min(map(due_at, uses), default=NEVER)
