"""Choose the chunks to evict from memory. Pure. ``machine`` has the rules."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from keepstep_relay.core.checkpoint import Checkpoint
from keepstep_relay.core.events import Key, Tier
from keepstep_relay.core.inventory import Chunk


def evictions(
    memory: Iterable[bytes], chunks: Mapping[bytes, Chunk], checkpoints: Mapping[Key, Checkpoint], size: int, now: float
) -> list[bytes]:
    """Return chunks to evict for ``size`` bytes, as far as possible. ``memory``: least recently used first."""

    def elsewhere(chunk: Chunk) -> bool:
        """Return whether every checkpoint of the chunk has it in another tier."""
        if Tier.DURABLE in chunk.tiers and all(checkpoints[key].copied for key, _ in chunk.users):
            return True
        return Tier.DISK in chunk.tiers

    def is_needed(chunk: Chunk) -> bool:
        """Whether an open upload or a recent reader needs the chunk."""
        users = (checkpoints[key] for key, _ in chunk.users)
        return any(one.committed_at is None or one.read_until > now for one in users)

    chosen: list[bytes] = []
    for needed in (False, True):
        for digest in memory:
            if size <= 0:
                return chosen
            chunk = chunks[digest]
            if not chunk.readers and elsewhere(chunk) and is_needed(chunk) is needed:
                chosen.append(digest)
                size -= chunk.length
    return chosen
