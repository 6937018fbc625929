"""What always holds for a relay's core. Tests check it after every event."""

from __future__ import annotations

from keepstep_relay.core.events import Key, Kind, Tier
from keepstep_relay.core.inventory import MAX_ENDED, NEVER
from keepstep_relay.core.machine import RelayCore


def check_invariants(core: RelayCore) -> None:
    """Raises ``AssertionError`` that says which invariant is broken."""
    used: dict[bytes, set[tuple[Key, int]]] = {}
    for key, one in core.checkpoints.items():
        assert one.key == key
        assert key not in core.ended, "a checkpoint that is there and gone"
        assert set(one.tables) == set(one.lacking) <= set(range(one.facts.ranks))
        assert one.reported <= set(one.tables), "a rank reported without a table"
        assert one.facts.kind is Kind.LIVE or not one.part, "a part of what is to last"
        if one.committed_at is None:
            lacks = any(one.lacking[rank] for rank in one.reported)
            assert one.part or not lacks, "a rank reported that lacks chunks"
            waited_for = one.longest_silent_since < NEVER
            assert one.sealing or one.is_part or waited_for, "an upload that nobody is waited for stays"
        for rank, table in one.tables.items():
            assert one.root(rank) == table.root
            here = {digest for digest in table.digests if core.chunks[digest].tiers}
            assert one.lacking[rank] == len(set(table.digests) - here), "lacking chunks miscounted"
            for number, digest in enumerate(table.digests):
                used.setdefault(digest, set()).add((key, rank))
                assert core.chunks[digest].length == table.length(number)
        assert not (one.sealing and one.committed_at is not None)
        if one.committed_at is not None or one.sealing:
            assert len(one.tables) == one.facts.ranks, "committed without a table"
            assert not one.heard.keys() & one.reported, "a rank that is done and waited for"
    for digest, chunk in core.chunks.items():
        assert chunk.users == used.get(digest, set()), "users of a chunk miscounted"
        assert chunk.readers >= 0
        assert chunk.users or chunk.readers, "a chunk that nothing needs"
        copied = any(core.checkpoints[key].copied for key, _ in chunk.users)
        assert copied or Tier.DURABLE not in chunk.tiers, "in a copy that is no more"
        assert (digest in core.memory) == (Tier.MEMORY in chunk.tiers), "memory miscounted"
    for tier in Tier:
        held = sum(chunk.length for chunk in core.chunks.values() if tier in chunk.tiers)
        assert core.tier_bytes[tier] == held, "bytes of a tier miscounted"
    assert len(core.checkpoints) <= core.limits.checkpoints
    assert len(core.ended) <= MAX_ENDED
