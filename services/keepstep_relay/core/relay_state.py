"""The knowledge of a relay: its checkpoints, their chunks, and deleted checkpoints. ``machine`` changes it. Pure."""

from __future__ import annotations

from collections import OrderedDict

from keepstep_relay.core.checkpoint import Checkpoint, Ended
from keepstep_relay.core.events import Cause, Key, Limits, RefusedError, State
from keepstep_relay.core.expiry import next_expiry
from keepstep_relay.core.inventory import Inventory
from keepstep_relay.core.retention import OVERWRITTEN


class RelayState:
    """State of one relay, and questions about it."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.checkpoints: dict[Key, Checkpoint] = {}
        self.inventory = Inventory()
        self.ended: OrderedDict[Key, Ended] = OrderedDict()
        """Deleted checkpoints, the oldest first."""
        self._versions: dict[Key, set[int]] = {}
        """Versions in ``checkpoints``, by version 0."""

    def versions(self, key: Key) -> list[Checkpoint]:
        """Return the versions of a checkpoint that are here, the oldest first."""
        return [self.checkpoints[key.at(version)] for version in sorted(self._versions.get(key.at(0), ()))]

    def current(self, key: Key) -> Key:
        """Return the version of a checkpoint that was committed last; without one, the last; without any, version 0."""
        versions = self.versions(key)
        committed = [one for one in versions if one.committed_at is not None]
        return (committed or versions)[-1].key if versions else key.at(0)

    def to_begin(self, key: Key, *, overwrite: bool) -> Key:
        """Return the version that a save begins or joins: with ``overwrite``, one that is not committed."""
        if not overwrite or not (versions := self.versions(key)):
            return self.current(key)
        last = versions[-1]
        return last.key if last.committed_at is None else key.at(last.key.version + 1)

    def checkpoint(self, key: Key) -> Checkpoint:
        """Return a checkpoint. Raises ``RefusedError`` if it is unknown, or was deleted: with the reason."""
        one = self.checkpoints.get(key)
        if one is None:
            if (ended := self.ended.get(key)) is not None:
                raise RefusedError(Cause.GONE, f"{key} was deleted: {ended.reason}")
            if key.version < self.current(key).version:
                raise RefusedError(Cause.GONE, f"{key} was deleted: {OVERWRITTEN}")
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
        if key in self.ended:
            return self.ended[key].state is State.COMMITTED
        return key.version < self.current(key).version  # replaced before the relay restarted

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
