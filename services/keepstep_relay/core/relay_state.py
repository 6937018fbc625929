"""The knowledge of a relay: its checkpoints, their chunks, and deleted checkpoints. ``machine`` changes it. Pure."""

from __future__ import annotations

from collections import OrderedDict

from keepstep_relay.core.checkpoint import Checkpoint, Ended
from keepstep_relay.core.events import Cause, Key, Limits, RefusedError, State
from keepstep_relay.core.expiry import next_expiry
from keepstep_relay.core.inventory import Inventory


class RelayState:
    """State of one relay, and questions about it."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.checkpoints: dict[Key, Checkpoint] = {}
        self.inventory = Inventory()
        self.ended: OrderedDict[Key, Ended] = OrderedDict()
        """Deleted checkpoints, the oldest first."""

    def checkpoint(self, key: Key) -> Checkpoint:
        """Return a checkpoint. Raises ``RefusedError`` if it is unknown, or was deleted: with the reason."""
        one = self.checkpoints.get(key)
        if one is None:
            if (ended := self.ended.get(key)) is not None:
                raise RefusedError(Cause.GONE, f"{key} was deleted: {ended.reason}")
            raise RefusedError(Cause.UNKNOWN, f"{key} not found")
        return one

    def upload(self, key: Key) -> Checkpoint:
        """Return a checkpoint that is not committed. Raises ``RefusedError`` if it is, and as ``checkpoint``."""
        one = self.checkpoint(key)
        if one.committed_at is not None:
            raise RefusedError(Cause.CONFLICT, f"{key} is already committed and cannot change")
        return one

    def was_committed(self, key: Key) -> bool:
        """Return whether a checkpoint that was deleted had been committed and kept for a time."""
        return key in self.ended and self.ended[key].state is State.COMMITTED

    def is_coming(self, digest: bytes) -> bool:
        """Whether an open upload names the chunk."""
        chunk = self.inventory.chunks.get(digest)
        return chunk is not None and any(self.checkpoints[key].committed_at is None for key, _ in chunk.users)

    def missing_bytes(self, one: Checkpoint) -> int:
        """Return the bytes of a checkpoint that are not here, of the ranks whose table is here."""
        return self.inventory.missing_bytes(one.tables[rank] for rank, count in one.missing.items() if count)

    def deadline(self) -> float:
        """Return when the shell has to send ``Tick``; ``NEVER`` if no end is due."""
        return next_expiry(self.checkpoints.values(), self.limits)
