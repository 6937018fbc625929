"""Invariants of a relay's core. Tests check them after every event."""

from __future__ import annotations

from keepstep_relay.core.checkpoint import MAX_ENDED, NEVER
from keepstep_relay.core.events import Key, Kind, Tier
from keepstep_relay.core.machine import RelayCore


def check_invariants(core: RelayCore) -> None:
    """Raise ``AssertionError`` that names the broken invariant."""
    used: dict[bytes, set[tuple[Key, int]]] = {}
    for key, one in core.checkpoints.items():
        assert one.key == key
        assert key not in core.ended, "a checkpoint both exists and has ended"
        assert set(one.tables) == set(one.missing) <= set(range(one.facts.ranks))
        assert one.reported <= set(one.tables), "a rank reported without a table"
        assert one.replaced == (key.version < core.current(key).version), "a replaced version is not marked"
        assert one.committed_at is not None or not one.replaced, "a later version was committed before an open one"
        assert one.facts.kind is Kind.LIVE or not one.part, "a durable checkpoint is partial"
        if one.committed_at is None:
            incomplete = any(one.missing[rank] for rank in one.reported)
            assert one.part or not incomplete, "a rank with missing chunks reported success"
            has_deadline = one.longest_silent_since < NEVER
            assert one.sealing or one.is_part or has_deadline, "an open upload has no deadline"
        for rank, table in one.tables.items():
            assert one.root(rank) == table.root
            here = {digest for digest in table.digests if core.inventory.chunks[digest].tiers}
            assert one.missing[rank] == len(set(table.digests) - here), "missing chunks miscounted"
            for number, digest in enumerate(table.digests):
                used.setdefault(digest, set()).add((key, rank))
                assert core.inventory.chunks[digest].length == table.length(number)
        assert not (one.sealing and one.committed_at is not None)
        if one.committed_at is not None or one.sealing:
            assert len(one.tables) == one.facts.ranks, "committed without a table"
            assert not one.heard.keys() & one.reported, "a rank that reported has a deadline"
    for digest, chunk in core.inventory.chunks.items():
        assert chunk.users == used.get(digest, set()), "users of a chunk miscounted"
        assert chunk.readers >= 0
        assert chunk.users or chunk.readers, "an unused chunk is kept"
        copied = any(core.checkpoints[key].copied for key, _ in chunk.users)
        assert copied or Tier.DURABLE not in chunk.tiers, "a chunk is in a deleted copy"
        assert (digest in core.inventory.memory) == (Tier.MEMORY in chunk.tiers), "memory miscounted"
    for tier in Tier:
        held = sum(chunk.length for chunk in core.inventory.chunks.values() if tier in chunk.tiers)
        assert core.inventory.tier_bytes[tier] == held, "bytes of a tier miscounted"
    assert len(core.checkpoints) <= core.limits.checkpoints
    assert len(core.ended) <= MAX_ENDED
