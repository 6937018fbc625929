"""Records that workers, lighthouses and relays send to the metrics service, one frozen dataclass each.

A batch is one msgpack map: the fields of ``BatchHead``, and ``records``, a list of maps. A record's map has its
``kind`` and its fields by name, so that peers of different releases understand each other: the reader ignores unknown
fields and unknown kinds, and a field with a default may be missing. The decoder of each field follows from its type
hint; the types at the top add limits. Any other value is a ``BadBatchError`` that names the field. Pure.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Literal

import msgpack

from keepstep_mesh.protocol import names
from keepstep_mesh.protocol.records import Decoder, Format

MAX_RECORDS = 20_000
"""Records of one batch."""
MAX_TEXT = 1000
"""Characters of a text; the reader cuts a longer one."""
MAX_VALUES = 16
"""Values of one step, such as ``loss``; the reader drops the rest."""
MAX_VALUE_NAME = 64
MAX_STEP_SECONDS = 30 * 86400.0
"""The reader cuts longer times of a step."""
MAX_DEPTH = 8
"""Nesting of maps and lists in the detail of an event."""


class BadBatchError(ValueError):
    """A batch that the metrics service refuses. The message names the field, the value and what is allowed."""


def _flag(value: Any, _name: str) -> bool:
    return value is True


def _whole(value: Any, name: str) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise BadBatchError(f"{name} must be an integer in [0, 2^63), not {_shown(value)}")
    return value


def _real(value: Any, name: str) -> float:
    if type(value) not in (float, int) or not math.isfinite(value):
        raise BadBatchError(f"{name} must be a finite number, not {_shown(value)}")
    return float(value)


def _text(value: Any, name: str) -> str:
    if type(value) is not str:
        raise BadBatchError(f"{name} must be a string, not {_shown(value)}")
    return value if len(value) <= MAX_TEXT else value[:MAX_TEXT]


def _seconds(value: Any, name: str) -> float:
    seconds = _real(value, name)
    return seconds if 0.0 <= seconds <= MAX_STEP_SECONDS else min(max(seconds, 0.0), MAX_STEP_SECONDS)


def _seconds_or_none(value: Any, name: str) -> float | None:
    return None if value is None else _seconds(value, name)


def _not_empty(value: Any, name: str) -> str:
    text = _text(value, name)
    if not text:
        raise BadBatchError(f"{name} must not be empty")
    return text


def _job(value: Any, name: str) -> str:
    text = _text(value, name)
    if (problem := names.problem(text, "job")) is not None:
        raise BadBatchError(problem)
    return text


def _job_or_none(value: Any, name: str) -> str:
    return "" if value == "" else _job(value, name)


def _values(value: Any, name: str) -> dict[str, float]:
    if type(value) is not dict:
        raise BadBatchError(f"{name} must be a map of names to numbers, not {_shown(value)}")
    return {
        _text(key, f"a name in {name}")[:MAX_VALUE_NAME]: float(number)
        for key, number in islice(value.items(), MAX_VALUES)
        if type(number) in (float, int) and math.isfinite(number)
    }


def _detail(value: Any, name: str) -> dict[str, Any]:
    if type(value) is not dict:
        raise BadBatchError(f"{name} must be a map, not {_shown(value)}")
    detail: dict[str, Any] = _as_json(value, name, MAX_DEPTH)
    return detail


def _as_json(value: Any, name: str, depth: int) -> Any:
    """Return what JSON can say: strings as keys, and the ``repr`` of values that JSON does not have."""
    if isinstance(value, dict | list) and not depth:
        raise BadBatchError(f"{name} is nested too deeply (limit: {MAX_DEPTH} levels)")
    if isinstance(value, dict):
        return {str(key): _as_json(one, name, depth - 1) for key, one in value.items()}
    if isinstance(value, list):
        return [_as_json(one, name, depth - 1) for one in value]
    return value if isinstance(value, str | int | float | None) else repr(value)


def _shown(value: Any) -> str:
    return type(value).__name__ if isinstance(value, dict | list) else f"{value!r:.40}"


Source = Literal["worker", "lighthouse", "relay"]
SOURCES: tuple[Source, ...] = typing.get_args(Source)


def _source(value: Any, name: str) -> str:
    if value not in SOURCES:
        raise BadBatchError(f"{name} must be one of {', '.join(SOURCES)}, not {_shown(value)}")
    return str(value)


Seconds = Annotated[float, _seconds]
"""At least 0, at most ``MAX_STEP_SECONDS``."""
JobName = Annotated[str, _job]
OptionalJobName = Annotated[str, _job_or_none]
"""Empty: no job."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One step of a replica group. ``t``: Unix time of its end."""

    kind: ClassVar[str] = "step"
    t: float
    step: int
    """Committed steps after it."""
    quorum_id: int = 0
    epoch: int = 0
    """Of the lighthouse that formed the quorum."""
    committed: bool = False
    reason: str = ""
    """Why it was not committed."""
    participants: int = 0
    seconds: Seconds
    """From the end of the step before to the end of this one."""
    quorum_seconds: Seconds = 0.0
    """Waited for the quorum."""
    heal_seconds: Seconds = 0.0
    busy_seconds: Annotated[float | None, _seconds_or_none] = None
    """The group's own work, until its last collective began; None: unknown."""
    values: Annotated[dict[str, float], _values] = field(default_factory=dict)
    """Recorded by the training script, such as ``loss``."""
    nonfinite: bool = False
    """The group contributed a NaN or an infinity to an average of this step."""
    retries: int = 0
    """How often the group took the step again with the same gradients, after the loss of a member."""
    retry_seconds: Seconds = 0.0
    """From the first failure of a step that was retried to its end, without its waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateRecord:
    """State of a replica group from ``t`` on (Unix time), until its next record."""

    kind: ClassVar[str] = "state"
    t: float
    state: str
    """``training``, ``waiting_quorum``, ``healing``, ``retrying``, ``draining`` or ``standby``; the reader ignores
    others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DurableRecord:
    """The end of one write of a durable checkpoint, or the checkpoint that a group resumed from. ``t``: Unix time."""

    kind: ClassVar[str] = "durable"
    t: float
    step: int
    every: int = 0
    """Steps between two checkpoints; 0: none is due by itself."""
    bytes: int = 0
    """Size of the state of one rank."""
    seconds: Seconds = 0.0
    """From the staging copy to the commit."""
    error: str = ""
    """Why it was not written; empty: it is committed."""
    committed: float = 0.0
    """Unix time of its commit, if the group resumed from it; 0: it was committed at ``t``."""
    skipped: str = ""
    """Ids of newer checkpoints that the group did not resume from, because they are damaged, with spaces between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRecord:
    """One entry of a lighthouse's event log. ``t``: Unix time."""

    kind: ClassVar[str] = "event"
    t: float
    id: int
    """The lighthouse's number for it."""
    job: OptionalJobName = ""
    event: str
    replica_id: str = ""
    """An incarnation or a stable name; empty: the event is about the job."""
    epoch: int = 0
    detail: Annotated[dict[str, Any], _detail] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadRecord:
    """Progress of the upload of a checkpoint to a relay. ``t`` and ``began``: Unix time."""

    kind: ClassVar[str] = "transfer"
    t: float
    began: float
    job: JobName
    checkpoint: str
    step: int
    bytes: int
    """Size of the whole upload."""
    bytes_done: int
    bytes_per_second: float = 0.0
    state: str
    """``uploading``, or how it ended: ``committed``, ``aborted``, ``ended``."""
    error: str = ""


Record = StepRecord | StateRecord | DurableRecord | EventRecord | UploadRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchHead:
    """The sender of a batch, and the place of the batch in everything that it sends."""

    source: Annotated[Source, _source]
    name: Annotated[str, _not_empty]
    """replica_id of a worker, name of a service."""
    job: OptionalJobName = ""
    """The job of a worker; empty for a service."""
    boot: Annotated[str, _not_empty]
    """Unique to the process of the sender."""
    first: int
    """Number of the first record; the records of a ``boot`` are numbered from 1."""
    dropped: int = 0
    """Records that this ``boot`` dropped until now."""
    clock_offset: float = 0.0
    """Clock of the metrics service minus the sender's, in seconds, as the sender measured it; 0: unknown."""


@dataclass(frozen=True, slots=True)
class Batch:
    head: BatchHead
    records: tuple[Record | None, ...]
    """None: a record of an unknown kind, or of a kind that this source may not send."""


# ---- writing


def pack_record(record: Record) -> bytes:
    """Return the packed map of a record. A value that msgpack cannot pack becomes its ``repr``.

    Raises:
        ValueError, TypeError, OverflowError, RecursionError: It cannot be packed.
    """
    names, read = _FIELDS[type(record)]
    plain = {"kind": record.kind, **dict(zip(names, read(record), strict=True))}
    packed: bytes = msgpack.packb(plain, default=repr, unicode_errors="backslashreplace")
    return packed


def pack_batch(head: BatchHead, records: list[bytes]) -> bytes:
    """Return the packed map of a batch of ``records`` that ``pack_record`` packed."""
    names, read = _FIELDS[BatchHead]
    packer = msgpack.Packer(autoreset=False)
    packer.pack_map_header(len(names) + 1)
    for name, value in zip(names, read(head), strict=True):
        packer.pack(name)
        packer.pack(value)
    packer.pack("records")
    packer.pack_array_header(len(records))
    packed: bytes = packer.bytes() + b"".join(records)
    return packed


# ---- reading


def read_batch(body: bytes) -> Batch:
    """Return the batch in ``body``.

    Raises:
        BadBatchError: The body is no batch, or a field has a value that is not allowed.
    """
    try:
        plain = msgpack.unpackb(body, strict_map_key=True)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise BadBatchError(f"the body must be a msgpack map: {error or type(error).__name__}") from error
    if not isinstance(plain, dict):
        raise BadBatchError(f"the body must be a msgpack map, not {_shown(plain)}")
    head: BatchHead = _HEAD(plain, "")
    if head.source == "worker" and not head.job:
        raise BadBatchError("job is missing: a worker must name its job")
    records = plain.get("records")
    if not isinstance(records, list) or len(records) > MAX_RECORDS:
        raise BadBatchError(f"records must be a list of at most {MAX_RECORDS}")
    decoders = _DECODERS[head.source]
    return Batch(head, tuple([_record(one, decoders) for one in records]))


def _record(plain: Any, decoders: dict[str, Decoder]) -> Record | None:
    if not isinstance(plain, dict):
        raise BadBatchError(f"each record must be a map, not {_shown(plain)}")
    kind = plain.get("kind")
    if type(kind) is not str or kind not in decoders:
        return None
    record: Record = decoders[kind](plain, kind)
    return record


_BY_WORKERS, _BY_SERVICES = (StepRecord, StateRecord, DurableRecord), (EventRecord, UploadRecord)
_FIELDS = {
    cls: (names, attrgetter(*names))
    for cls in (BatchHead, *_BY_WORKERS, *_BY_SERVICES)
    for names in [[one.name for one in dataclasses.fields(cls)]]
}
"""Names of the fields of a record, and their reader."""
_FORMAT = Format(BadBatchError, {bool: _flag, int: _whole, float: _real, str: _text})
_HEAD = _FORMAT.of_map(BatchHead)
_DECODERS: dict[str, dict[str, Decoder]] = {
    source: {cls.kind: _FORMAT.of_map(cls) for cls in (_BY_WORKERS if source == "worker" else _BY_SERVICES)}
    for source in SOURCES
}
