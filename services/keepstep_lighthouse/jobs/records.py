"""What of a job is stored: its record as JSON, readable for people and for builds that know more or fewer fields."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any, TypeVar

from keepstep_lighthouse.quorum.events import Ban, JobRecord, Policy
from keepstep_lighthouse.store.contract import StoreError

T = TypeVar("T")

JOB_PREFIX = "jobs/"
FLOOR_KEY = "first_quorum_id"
"""With which the next new job is created: above every quorum_id of a job that was deleted."""


def encode(record: JobRecord) -> bytes:
    return json.dumps(asdict(record)).encode()


def decode(key: str, value: bytes) -> JobRecord:
    """Raises ``StoreError`` that names the key when this is no record."""
    try:
        plain = json.loads(value)
        plain["policy"] = _known(Policy, plain["policy"])
        plain["bans"] = tuple(_known(Ban, ban) for ban in plain["bans"])
        plain["members"] = tuple(plain["members"])
        plain["evicted"] = tuple(plain["evicted"])
        return _known(JobRecord, plain)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{key} in the store is not the record of a job ({error!r}); restore or delete it") from error


def parse_floor(stored: bytes | None) -> int:
    """Raises ``StoreError`` when what is stored is no quorum_id."""
    try:
        return int(stored or b"0")
    except ValueError as error:
        raise StoreError(f"{FLOOR_KEY} in the store is {stored!r} and no number; restore it") from error


def _known(cls: type[T], plain: dict[str, Any]) -> T:
    names = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    return cls(**{name: value for name, value in plain.items() if name in names})
