"""Events as the metrics service keeps them, and how to read the detail of one, which may hold anything. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from keepstep_mesh.protocol.telemetry_records import MAX_TEXT

MAX_INTEGER = 2**63 - 1
"""Largest integer that SQLite and msgpack take."""
JOB_DELETED = "job_deleted"
"""Event of a lighthouse that ends a job."""
JOB_ENDS = ("job_finished", "job_failed", "job_stopped")
"""Events of a lighthouse: the last group has gone."""
ORDERS = ("evicted", "readmitted")
PROBATION = ("parted", "let_in")
"""Events about a group on probation."""
BY_STABLE_NAME = (*ORDERS, *PROBATION)
"""Events that may name a group by its stable name; all others name an incarnation."""


@dataclass(frozen=True, slots=True)
class Event:
    """``id``: this service's number; it grows with each event of any job. ``t``: Unix time."""

    id: int
    t: float
    event: str
    name: str
    """Stable name of a group; empty: the event is about the job."""
    sentence: str
    detail: dict[str, Any]


def reason_of(detail: Mapping[str, Any]) -> str:
    return str(detail.get("reason", ""))[:MAX_TEXT]


def is_loss(event: str, detail: Mapping[str, Any]) -> bool:
    """Whether a group ended by a failure: it was lost, or its script ended with an error and left."""
    return event == "lost" or (event == "left" and detail.get("cause") == "failed")


def integer(value: Any) -> int:
    """Return ``value`` if it is an integer from 0 to ``MAX_INTEGER``, else 0."""
    return value if type(value) is int and 0 <= value <= MAX_INTEGER else 0


def number(value: Any) -> float:
    """Return ``value`` if it is a number, else 0."""
    return float(value) if isinstance(value, int | float) else 0.0
