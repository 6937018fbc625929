"""The groups of a transfer of live state, and its progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Progress = Callable[[int, int], None]
"""Called with (bytes received so far, bytes in all) during a transfer; from any thread, never from two at once."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """The groups that have, and that need, the live state of one step.

    Only ``replica_id`` and ``rank`` differ between the groups.
    """

    job: str
    epoch: int
    quorum_id: int
    step: int
    replica_id: str
    rank: int
    world_size: int
    """Ranks of each group."""
    sources: tuple[str, ...]
    """replica_ids of all groups that have the state."""
    joiners: tuple[str, ...]
    """replica_ids of all groups that heal."""
    beside: tuple[str, ...] = ()
    """replica_ids of the groups that heal from the same source, with ``replica_id``; empty: unknown."""
    together: bool = False
    """Whether all groups wait until all have healed."""
