"""The stored record of a job: JSON, readable for people and for versions with more or fewer fields."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from keepstep_lighthouse.quorum.job_record import JobRecord
from keepstep_lighthouse.store.contract import StoreError

JOB_PREFIX = "jobs/"
IN_EVERY_RECORD = {"policy", "members", "bans", "evicted"}
FLOOR_KEY = "first_quorum_id"
"""quorum_id of the next new job: above those of all deleted jobs."""


def encode(record: JobRecord) -> bytes:
    return json.dumps(_plain(record), default=_plain).encode()


def _plain(record: Any) -> dict[str, Any]:
    """Return the fields of a dataclass. ``asdict`` copies them, which takes most of the time of ``encode``."""
    return {field.name: getattr(record, field.name) for field in fields(record)}


def decode(key: str, value: bytes) -> JobRecord:
    """Decode a record. Raise ``StoreError`` with the key if it is invalid."""
    try:
        plain = json.loads(value)
        if missing := IN_EVERY_RECORD - plain.keys():
            raise ValueError(f"missing: {', '.join(sorted(missing))}")
        record: JobRecord = _read(JobRecord, plain)
        return record
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{key} in the store is not the record of a job ({error!r}); restore or delete it") from error


def parse_floor(stored: bytes | None) -> int:
    """Decode a quorum_id. Raise ``StoreError`` if it is invalid."""
    try:
        return int(stored or b"0")
    except ValueError as error:
        raise StoreError(f"{FLOOR_KEY} in the store is {stored!r}, which is not a number; restore it") from error


def _read(hint: Any, value: Any) -> Any:
    """Return a value of JSON as a field of this type holds it. Unknown fields of a record are left out."""
    if is_dataclass(hint):
        hints = get_type_hints(hint)
        return hint(**{name: _read(hints[name], one) for name, one in value.items() if name in hints})  # type: ignore[operator]
    if get_origin(hint) is tuple:
        return tuple([_read(get_args(hint)[0], one) for one in value])
    if get_origin(hint) is UnionType and value is not None:
        records = [one for one in get_args(hint) if is_dataclass(one)]
        return _read(records[0], value) if records else value
    return value
