"""What people may ask the core for: frozen pictures of the quorum and of each group."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from keepstep_lighthouse.events import Reason
from keepstep_mesh.messages import Lineage


class ReplicaState(Enum):
    ASKING = "asking"
    """Waits for the next quorum."""
    TRAINING = "training"
    """At work under the current quorum."""
    HEALING = "healing"
    IDLE = "idle"
    """Connected, not in the quorum, has not asked."""
    KEPT_OUT = "kept_out"
    """Waits behind an older incarnation of its name, or its layout does not fit."""
    SUSPECT = "suspect"
    """Its connection ended; it may come back within reconnect_grace."""
    ABSENT = "absent"
    """Of the quorum that a restarted lighthouse found; not back yet."""
    GONE = "gone"


@dataclass(frozen=True, slots=True)
class ReplicaView:
    replica_id: str
    name: str
    state: ReplicaState
    member: bool
    """Of the current quorum."""
    draining: bool
    step: int
    lineage: Lineage
    world_size: int
    address: str
    heard_seconds_ago: float | None
    """None: never heard by this lighthouse."""
    step_seconds: float | None
    """From its last answer to its next request; None before there were two."""
    healed_bytes: int
    heal_bytes: int
    """0: unknown, or not healing."""
    reason: Reason | None
    """Why it waits or is gone, where there is a reason of its own."""


@dataclass(frozen=True, slots=True)
class QuorumView:
    quorum_id: int
    created_ms: int
    members: tuple[str, ...]
    step: int
    lineage: Lineage
    """Reference state of the last round that this lighthouse announced; 0 and "" before."""
    asking: tuple[str, ...]
    """Sorted."""
    healthy: int
    joiners: int
    reason: Reason
    """Why the next quorum is not formed yet; when nobody asks, how the last one was."""
