"""Spans of OpenTelemetry, and which of them a process exports. Pure.

A *trace* is one step of a job under one quorum. All groups and ranks compute the same trace_id from the quorum, so that
a viewer shows them together. Their span_ids follow from the trace and the rank, so a log line can name its span
before the span has ended.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from keepstep_mesh.protocol.telemetry_records import Record, UploadRecord

STEP = "step"
QUORUM = "quorum"
RECONFIGURE = "reconfigure"
HEAL = "heal"
ALL_REDUCE = "all-reduce"
COMMIT = "commit"
LOGS = "logs"
SPAN_GROUPS = (STEP, QUORUM, RECONFIGURE, HEAL, ALL_REDUCE, COMMIT)
ALL = "all"

AttributeValue = str | bool | int | float


@dataclass(frozen=True, slots=True)
class SpanContext:
    """Identity of a span."""

    trace_id: int
    """128 bits."""
    span_id: int
    """64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A span that has ended. Times are Unix seconds."""

    name: str
    context: SpanContext
    parent: SpanContext | None = None
    began: float
    ended: float
    attributes: Mapping[str, AttributeValue] = field(default_factory=dict)
    """Names without ``keepstep.``, which the exporter adds."""
    error: str = ""
    """Empty: it succeeded."""


def chosen(text: str) -> frozenset[str]:
    """Return the names in ``text``, which commas separate. ValueError names the one that is unknown."""
    names = {one.strip().lower() for one in text.split(",") if one.strip()}
    known = {*SPAN_GROUPS, LOGS}
    if unknown := sorted(names - known - {ALL}):
        raise ValueError(f"unknown name {unknown[0]!r}; write all, or some of {', '.join((*SPAN_GROUPS, LOGS))}")
    return frozenset(known if ALL in names else names)


def trace_of(*names: object) -> int:
    """Return the trace_id of what ``names`` identify."""
    return _number(16, names)


def span_of(trace_id: int, *names: object) -> SpanContext:
    """Return the identity of a span in a trace; ``names`` tell it from the others there."""
    return SpanContext(trace_id, _number(8, (trace_id, *names)))


def of_record(record: Record) -> Span | None:
    """Return the span of a service's record; None: it has none. Steps of trainers have more facts (``StepTrace``)."""
    if not isinstance(record, UploadRecord):
        return None
    facts: dict[str, AttributeValue] = {
        name: getattr(record, name) for name in ("job", "checkpoint", "step", "bytes", "bytes_done", "state")
    }
    context = span_of(trace_of("upload", record.job, record.checkpoint, record.began))
    return Span(
        name="upload", context=context, began=record.began, ended=record.t, attributes=facts, error=record.error
    )


def _number(size: int, names: tuple[object, ...]) -> int:
    """Return a number of ``size`` bytes that is not 0, which OpenTelemetry does not allow."""
    digest = hashlib.blake2b("\0".join(map(str, names)).encode(errors="backslashreplace"), digest_size=size).digest()
    return int.from_bytes(digest, "big") or 1
