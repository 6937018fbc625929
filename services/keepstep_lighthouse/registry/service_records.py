"""The stored record of a registered service: JSON, under a lease. Pure."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Any

from keepstep_lighthouse.store.contract import StoreError
from keepstep_mesh.config.settings import split_addresses
from keepstep_mesh.protocol import names
from keepstep_mesh.protocol.messages import Detail, ServiceAddress

PREFIX = "services/"
KINDS = ("metrics", "relay")
MIN_TTL, MAX_TTL = 1.0, 3600.0
MAX_ADDRESS = 256
MAX_DETAILS_BYTES = 4096
"""Of the details as JSON."""


@dataclass(frozen=True, slots=True)
class ServiceRecord:
    kind: str
    name: str
    """Of this kind, unique in the cluster."""
    address: str
    """``http://host:port``, as workers reach it."""
    ttl_seconds: float
    """Time to live of the registration; each renewal starts it again."""
    since: float
    """Unix seconds: since then registered under this address without a gap."""
    details: dict[str, Detail] = field(default_factory=dict)
    """Details for operators, from the service itself."""

    @property
    def key(self) -> str:
        return key_of(self.kind, self.name)

    @property
    def as_address(self) -> ServiceAddress:
        return ServiceAddress(self.kind, self.name, self.address)


def key_of(kind: str, name: str) -> str:
    return f"{PREFIX}{kind}/{name}"


def name_problem(kind: str, name: str) -> str | None:
    """Return what is wrong with a kind or a name, as a sentence; None: valid."""
    if kind not in KINDS:
        return f"invalid kind of service {kind[:40]!r}: expected one of {', '.join(KINDS)}"
    return names.problem(name, "service")


def record_problem(record: ServiceRecord) -> str | None:
    """Return what is wrong with a record whose fields have their types, as a sentence; None: valid."""
    if (problem := name_problem(record.kind, record.name)) is not None:
        return problem
    try:
        if len(record.address) > MAX_ADDRESS or split_addresses(record.address) != (record.address,):
            return f"address must be one http://host:port, not {record.address[:80]!r}"
    except ValueError as error:
        return f"address: {error}"
    if not MIN_TTL <= record.ttl_seconds <= MAX_TTL:
        return f"ttl_seconds must be between {MIN_TTL:g} and {MAX_TTL:g}, not {record.ttl_seconds!r:.40}"
    for name, value in record.details.items():
        if not isinstance(value, str | int | float | None) or (isinstance(value, float) and not math.isfinite(value)):
            return f"details.{name[:40]} must be text, a number, true, false or null, not {value!r:.40}"
    if (size := len(json.dumps(record.details))) > MAX_DETAILS_BYTES:
        return f"details too large: {size} bytes as JSON (limit {MAX_DETAILS_BYTES})"
    return None


def encode(record: ServiceRecord) -> bytes:
    return json.dumps(asdict(record)).encode()


def decode(key: str, value: bytes) -> ServiceRecord:
    """Decode a record, without fields of newer versions. Raise ``StoreError`` with the key if it is invalid."""
    try:
        plain: dict[str, Any] = json.loads(value)
        known = {name: plain[name] for name in ServiceRecord.__dataclass_fields__ if name in plain}
        record = ServiceRecord(**known)
        if record.key != key or record_problem(record) is not None:
            raise ValueError("its key or a value is invalid")
    except (ValueError, TypeError, AttributeError) as error:
        raise StoreError(f"{key} in the store is not the record of a service ({error!r}); delete it") from error
    return record
