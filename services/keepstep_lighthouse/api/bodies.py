"""Bodies of REST requests, one frozen dataclass each."""

from __future__ import annotations

from dataclasses import dataclass, field

from keepstep_mesh.protocol.messages import Detail


@dataclass(frozen=True, slots=True)
class EvictBody:
    reason: str
    ban_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class DrainBody:
    reason: str


@dataclass(frozen=True, slots=True)
class ReplaceBody:
    reason: str


@dataclass(frozen=True, slots=True)
class StragglerBody:
    steps: int
    """Consecutive committed steps in which the group was a straggler."""
    seconds: float
    """Own time of the group for a step, without waiting for others."""
    median_seconds: float
    """Median of that time over all groups."""


@dataclass(frozen=True, slots=True)
class ReadmitBody:
    pass


@dataclass(frozen=True, slots=True)
class VerifyBody:
    pass


@dataclass(frozen=True, slots=True)
class ReopenBody:
    pass


@dataclass(frozen=True, slots=True)
class ServiceBody:
    address: str
    ttl_seconds: float = 15.0
    details: dict[str, Detail] = field(default_factory=dict)
