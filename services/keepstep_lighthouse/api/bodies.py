"""What is said with an order over REST: one frozen dataclass for each body."""

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
class StragglerBody:
    steps: int
    """Committed in a row as a straggler."""
    seconds: float
    """What it needs itself for a step."""
    median_seconds: float
    """Over the groups."""


@dataclass(frozen=True, slots=True)
class ReadmitBody:
    pass


@dataclass(frozen=True, slots=True)
class VerifyBody:
    pass


@dataclass(frozen=True, slots=True)
class ServiceBody:
    address: str
    ttl_seconds: float = 15.0
    details: dict[str, Detail] = field(default_factory=dict)
