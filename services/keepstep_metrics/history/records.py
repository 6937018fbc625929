"""A batch as a sender packs it, checked. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgpack

from keepstep_mesh.protocol import names

SOURCES = ("worker", "lighthouse", "relay")
MAX_RECORDS = 20_000
MAX_TEXT = 1000
MAX_VALUES = 16
"""Of a step, as ``loss``; more are left out."""
MAX_SECONDS = 30 * 86400.0
"""No step takes longer."""
MAX_DEPTH = 8
"""Of maps and lists in the detail of an event."""


@dataclass(frozen=True, slots=True)
class Step:
    """What became of one step of a group. Times in seconds, ``t`` its end in Unix seconds."""

    t: float
    step: int
    """Committed steps after it."""
    quorum_id: int
    committed: bool
    reason: str
    participants: int
    seconds: float
    """From the end of the step before to the end of this one."""
    quorum_seconds: float
    """Waited for the quorum."""
    heal_seconds: float
    busy_seconds: float | None
    """What the group itself needed, until its last collective began; None: not known."""
    values: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StateRecord:
    """What a group does from ``t`` on, by its own word."""

    t: float
    state: str


@dataclass(frozen=True, slots=True)
class EventRecord:
    """An entry of a lighthouse's event log."""

    t: float
    id: int
    """The lighthouse's number for it."""
    job: str
    event: str
    replica_id: str
    epoch: int
    detail: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Upload:
    """How far a checkpoint has come to a relay."""

    t: float
    began: float
    """Unix seconds."""
    job: str
    checkpoint: str
    step: int
    bytes_total: int
    bytes_done: int
    state: str
    """``uploading`` until it has ended."""
    bytes_per_second: float
    error: str


class BadBatchError(ValueError):
    """Says what is wrong with it."""


Record = Step | StateRecord | EventRecord | Upload


@dataclass(frozen=True, slots=True)
class Batch:
    source: str
    name: str
    """replica_id of a worker, name of a service."""
    job: str
    boot: str
    """Of the sender's process."""
    first: int
    """Number of ``records[0]``."""
    dropped: int
    records: tuple[Record | None, ...]
    """None: of a kind that this build does not know, or that is not for such a sender to tell."""


def read_batch(body: bytes) -> Batch:
    """Raises ``BadBatchError``."""
    try:
        plain = msgpack.unpackb(body, strict_map_key=True)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise BadBatchError(f"the body is no msgpack map: {error or type(error).__name__}") from error
    if not isinstance(plain, dict):
        raise BadBatchError("the body must be a msgpack map")
    source = _text(plain, "source")
    if source not in SOURCES:
        raise BadBatchError(f"source is one of {', '.join(SOURCES)}, not {source[:40]!r}")
    job = _text(plain, "job", "")
    if source == "worker" and (problem := names.problem(job, "job")) is not None:
        raise BadBatchError(problem)
    records = plain.get("records")
    if not isinstance(records, list) or len(records) > MAX_RECORDS:
        raise BadBatchError(f"records must be a list of at most {MAX_RECORDS}")
    name, boot = _text(plain, "name"), _text(plain, "boot")
    if not name or not boot:
        raise BadBatchError("name and boot must not be empty")
    return Batch(
        source,
        name,
        job,
        boot,
        _whole(plain, "first"),
        _whole(plain, "dropped", 0),
        tuple([_record(one, source) for one in records]),
    )


def _record(plain: Any, source: str) -> Record | None:
    if not isinstance(plain, dict):
        raise BadBatchError("each record must be a map")
    match plain.get("kind"):
        case "step" if source == "worker":
            values = plain.get("values", {})
            if not isinstance(values, dict):
                raise BadBatchError("values must be a map of numbers")
            return Step(
                _real(plain, "t"),
                _whole(plain, "step"),
                _whole(plain, "quorum_id", 0),
                plain.get("committed") is True,
                _text(plain, "reason", ""),
                _whole(plain, "participants", 0),
                _seconds(plain, "seconds"),
                _seconds(plain, "quorum_seconds", 0.0),
                _seconds(plain, "heal_seconds", 0.0),
                _seconds(plain, "busy_seconds") if plain.get("busy_seconds") is not None else None,
                {
                    _text({"value": key}, "value")[:64]: float(number)
                    for key, number in islice(values.items(), MAX_VALUES)
                    if _is_finite(number)
                },
            )
        case "state" if source == "worker":
            return StateRecord(_real(plain, "t"), _text(plain, "state"))
        case "event" if source != "worker":
            detail = plain.get("detail", {})
            if not isinstance(detail, dict):
                raise BadBatchError("detail must be a map")
            job = _text(plain, "job", "")
            if job and (problem := names.problem(job, "job")) is not None:
                raise BadBatchError(problem)
            return EventRecord(
                _real(plain, "t"),
                _whole(plain, "id"),
                job,
                _text(plain, "event"),
                _text(plain, "replica_id", ""),
                _whole(plain, "epoch", 0),
                _plain(detail, MAX_DEPTH),
            )
        case "transfer" if source != "worker":
            job = _text(plain, "job")
            if (problem := names.problem(job, "job")) is not None:
                raise BadBatchError(problem)
            return Upload(
                _real(plain, "t"),
                _real(plain, "began"),
                job,
                _text(plain, "checkpoint"),
                _whole(plain, "step"),
                _whole(plain, "bytes"),
                _whole(plain, "bytes_done"),
                _text(plain, "state"),
                _real(plain, "bytes_per_second", 0.0),
                _text(plain, "error", ""),
            )
    return None


def _plain(value: Any, depth: int) -> Any:
    """The same as JSON has it: text for keys, and for what it does not know."""
    if isinstance(value, dict | list) and not depth:
        raise BadBatchError(f"detail must not be nested more than {MAX_DEPTH} deep")
    if isinstance(value, dict):
        return {str(key): _plain(one, depth - 1) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one, depth - 1) for one in value]
    return value if isinstance(value, str | int | float | None) else repr(value)


def _is_finite(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _text(plain: dict[Any, Any], name: str, default: str | None = None) -> str:
    value = plain.get(name, default)
    if type(value) is not str:
        raise BadBatchError(f"{name} must be text, not {_shown(value)}")
    return value[:MAX_TEXT]


def _whole(plain: dict[Any, Any], name: str, default: int | None = None) -> int:
    value = plain.get(name, default)
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise BadBatchError(f"{name} must be a whole number from 0 to 2^63, not {_shown(value)}")
    return value


def _real(plain: dict[Any, Any], name: str, default: float | None = None) -> float:
    value = plain.get(name, default)
    if not _is_finite(value):
        raise BadBatchError(f"{name} must be a finite number, not {_shown(value)}")
    return float(value)  # type: ignore[arg-type]


def _shown(value: Any) -> str:
    return type(value).__name__ if isinstance(value, dict | list) else f"{value!r:.40}"


def _seconds(plain: dict[Any, Any], name: str, default: float | None = None) -> float:
    return min(max(_real(plain, name, default), 0.0), MAX_SECONDS)
