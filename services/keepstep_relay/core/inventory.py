"""The chunks of a relay: which tiers have each, and which tables name it. Only ``machine`` changes it. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

from keepstep_relay.core.events import Cause, Key, RefusedError, Table, Tier


@dataclass(slots=True)
class Chunk:
    """Exists while a table names it or a reader holds it."""

    length: int
    users: set[tuple[Key, int]] = field(default_factory=set)
    """(checkpoint, rank) of each table that names it."""
    tiers: set[Tier] = field(default_factory=set)
    readers: int = 0


class Inventory:
    def __init__(self) -> None:
        self.chunks: dict[bytes, Chunk] = {}
        self.memory: OrderedDict[bytes, None] = OrderedDict()
        """Chunks in memory, the least recently used first."""
        self.tier_bytes = dict.fromkeys(Tier, 0)

    # ---- questions

    def is_here(self, digest: bytes) -> bool:
        """Whether a tier has the chunk."""
        chunk = self.chunks.get(digest)
        return chunk is not None and bool(chunk.tiers)

    def wanted(self, digest: bytes) -> int | None:
        """Return the length of the chunk; None: no table names it."""
        chunk = self.chunks.get(digest)
        return chunk.length if chunk is not None and chunk.users else None

    def missing(self, table: Table) -> tuple[bytes, int]:
        """Return the bitmap and the number of the table's chunks that are not here."""
        bitmap, count = bytearray(-(-len(table.digests) // 8)), 0
        for number, digest in enumerate(table.digests):
            if not self.chunks[digest].tiers:
                bitmap[number // 8] |= 1 << number % 8
                count += 1
        return bytes(bitmap), count

    def missing_bytes(self, tables: Iterable[Table]) -> int:
        """Return the bytes of the tables' chunks that are not here. Each table counts its distinct chunks."""
        chunks = (self.chunks[digest] for table in tables for digest in set(table.digests))
        return sum(chunk.length for chunk in chunks if not chunk.tiers)

    def unknown(self, rank: int, table: Table) -> list[bytes]:
        """Return the distinct chunks of a table that no table names yet.

        Raises:
            RefusedError: A chunk has another length than a known chunk with the same digest.
        """
        new: dict[bytes, int] = {}
        for number, digest in enumerate(table.digests):
            length, known = table.length(number), self.chunks.get(digest)
            expected = known.length if known is not None else new.setdefault(digest, length)
            if expected != length:
                raise RefusedError(
                    Cause.CONFLICT,
                    f"chunk {number} of rank {rank} has {length} bytes, a known chunk with its digest has {expected}",
                )
        return list(new)

    # ---- changes

    def add_user(self, key: Key, rank: int, table: Table) -> int:
        """Note that a table names its chunks. Return the number of its distinct chunks that are not here."""
        for number, digest in enumerate(table.digests):
            chunk = self.chunks.setdefault(digest, Chunk(table.length(number)))
            chunk.users.add((key, rank))
        return sum(not self.chunks[digest].tiers for digest in set(table.digests))

    def remove_user(self, key: Key, rank: int, table: Table) -> None:
        for digest in set(table.digests):
            self.chunks[digest].users.discard((key, rank))

    def add(self, digest: bytes, tier: Tier) -> bool:
        """Note that ``tier`` has a known chunk. Return whether it is the first tier."""
        chunk = self.chunks[digest]
        is_first = not chunk.tiers
        if tier not in chunk.tiers:
            chunk.tiers.add(tier)
            self.tier_bytes[tier] += chunk.length
            if tier is Tier.MEMORY:
                self.memory[digest] = None
        return is_first

    def remove(self, digest: bytes, tier: Tier) -> bool:
        """Note that ``tier`` no longer has the chunk. Return whether it was the last tier."""
        chunk = self.chunks.get(digest)
        if chunk is None or tier not in chunk.tiers:
            return False
        chunk.tiers.discard(tier)
        self.tier_bytes[tier] -= chunk.length
        if tier is Tier.MEMORY:
            del self.memory[digest]
        return not chunk.tiers

    def drop_unused(self, digests: Iterable[bytes]) -> tuple[bytes, ...]:
        """Forget those of ``digests`` that no table names and no reader holds. Return them."""
        dropped = []
        for digest in digests:
            chunk = self.chunks[digest]
            if not chunk.users and not chunk.readers:
                for tier in tuple(chunk.tiers):
                    self.remove(digest, tier)
                del self.chunks[digest]
                dropped.append(digest)
        return tuple(dropped)
