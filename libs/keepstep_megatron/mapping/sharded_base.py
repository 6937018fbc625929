"""The base of sharded leaves, and the choice of the replica that is saved."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Self, TypeAlias

StateDict: TypeAlias = dict[str, Any]
CommonStateDict: TypeAlias = dict[str, Any]
"""The part of a state without sharded leaves, equal on all ranks."""
ShardedStateDict: TypeAlias = dict[str, Any]
"""A state dict whose tensors are sharded leaves."""
ReplicaId: TypeAlias = int | tuple[int, ...]
"""Number of a copy of the same data; a tuple has one number for each kind of parallelism."""


class ShardedBase(ABC):
    """A leaf of a state dict that is a part of a value of all ranks.

    Attributes:
        key: name of the global value, equal on all ranks. Places in the state dict may differ between ranks.
        data: the local part; None: only the description is needed.
        replica_id: which copy of the part this rank has. The main replica (0, or a tuple of zeros) is saved.
    """

    key: str
    data: Any
    replica_id: ReplicaId

    @abstractmethod
    def validate_metadata_integrity(self) -> None:
        """Check that the fields fit each other. Raises ``CheckpointingException``."""

    @abstractmethod
    def without_data(self) -> Self:
        """Return a copy with ``data=None``."""


def is_main_replica(replica_id: ReplicaId) -> bool:
    """Return whether the replica is the one that is saved.

    Args:
        replica_id: number of the replica, or one number for each kind of parallelism.

    Returns:
        True for 0, and for a tuple of zeros.
    """
    if isinstance(replica_id, int):
        return replica_id == 0
    return not any(replica_id)
