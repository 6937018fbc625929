"""The state machine of a relay, stepped with events and validated after each."""

from __future__ import annotations

import pytest

from keepstep_mesh.protocol.manifest import CHUNK_BYTES
from keepstep_relay.core.events import (
    Begun,
    Cause,
    ChunkArrived,
    CommitAsked,
    Event,
    Facts,
    Key,
    Kind,
    Limits,
    RefusedError,
    Sealed,
    Table,
    TableArrived,
    Tier,
)
from keepstep_relay.core.invariants import check_invariants
from keepstep_relay.core.machine import RelayCore

C1, C2, C3 = (Key("job", name) for name in ("c1", "c2", "c3"))
A, B, C, LAST = (bytes([letter]) * 16 for letter in b"abcz")
ONE = Facts(step=1, kind=Kind.LIVE, ranks=1)
DISK, MEMORY = Tier.DISK, Tier.MEMORY


def table(*digests: bytes, last: int = 100, root: bytes = b"r" * 32) -> Table:
    """Whole chunks, and a last one of ``last`` bytes."""
    return Table(root, (len(digests) - 1) * CHUNK_BYTES + last, digests)


class Driver:
    """Steps a core and validates it after each event."""

    def __init__(self, **limits) -> None:
        self.core = RelayCore(Limits(**limits))
        self.now = 0.0

    def __call__(self, *events: Event, at: float | None = None):
        self.now = self.now if at is None else at
        decisions = []
        for event in events:
            decisions += self.core.step(event, self.now)
            check_invariants(self.core)
        return decisions

    def refused(self, event: Event, cause: Cause, words: str) -> None:
        with pytest.raises(RefusedError, match=words) as refused:
            self.core.step(event, self.now)
        assert refused.value.cause is cause
        check_invariants(self.core)

    def stored(self, key: Key, *digests: bytes, step: int = 1, tier: Tier = MEMORY, kind: Kind = Kind.LIVE):
        """A committed checkpoint; what committing it decided."""
        return self.committed(key, *digests, tier=tier, facts=Facts(step, kind, 1))

    def committed(self, key: Key, *digests: bytes, facts: Facts, tier: Tier = MEMORY):
        self(Begun(key, facts), TableArrived(key, 0, table(*digests)))
        self(*(ChunkArrived(digest, tier) for digest in digests if not self.core.inventory.is_here(digest)))
        self(CommitAsked(key))
        return self(Sealed(key))
