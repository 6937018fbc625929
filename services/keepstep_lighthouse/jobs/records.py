"""The stored record of a job: JSON, readable for people and for versions with more or fewer fields."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any, TypeVar

from keepstep_lighthouse.quorum.job_record import Ban, Divergence, JobEnd, JobRecord, Replacement
from keepstep_lighthouse.store.contract import StoreError
from keepstep_mesh.protocol.membership import FinalState
from keepstep_mesh.protocol.policy import Policy

T = TypeVar("T")

JOB_PREFIX = "jobs/"
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
        plain["policy"] = _known(Policy, plain["policy"])
        plain["bans"] = tuple(_known(Ban, ban) for ban in plain["bans"])
        plain["members"] = tuple(plain["members"])
        plain["evicted"] = tuple(plain["evicted"])
        plain["durable_relays"] = tuple(plain.get("durable_relays", ()))
        plain["replacing"] = tuple(_known(Replacement, one) for one in plain.get("replacing", ()))
        plain["diverged"] = tuple(_known(Divergence, one) for one in plain.get("diverged", ()))
        if plain.get("ended") is not None:
            plain["ended"] = _known(JobEnd, plain["ended"])
        if plain.get("closed") is not None:
            plain["closed"] = _known(FinalState, plain["closed"])
        return _known(JobRecord, plain)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{key} in the store is not the record of a job ({error!r}); restore or delete it") from error


def parse_floor(stored: bytes | None) -> int:
    """Decode a quorum_id. Raise ``StoreError`` if it is invalid."""
    try:
        return int(stored or b"0")
    except ValueError as error:
        raise StoreError(f"{FLOOR_KEY} in the store is {stored!r}, which is not a number; restore it") from error


def _known(cls: type[T], plain: dict[str, Any]) -> T:
    names = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    return cls(**{name: value for name, value in plain.items() if name in names})
