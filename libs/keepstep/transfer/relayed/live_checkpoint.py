"""The state of one step at the relays, which joiners fetch."""

from __future__ import annotations

import hashlib

from keepstep.relay_client.relay_requests import RelayCheckpoint
from keepstep.transfer.exchange import Exchange


class LiveCheckpoint(RelayCheckpoint):
    """The state of one step at the relays. All groups of the quorum derive the same ``id``."""

    def __init__(self, exchange: Exchange) -> None:
        world = hashlib.blake2b(
            repr((exchange.epoch, exchange.sources, exchange.joiners)).encode(), digest_size=6
        ).hexdigest()
        name = f"live-{exchange.quorum_id}-{exchange.step}-{world}"
        super().__init__(exchange.job, name, exchange.rank, exchange.replica_id)


def home(digest: bytes, relays: list[str]) -> str:
    """Return the relay of a chunk, by rendezvous hashing.

    Each relay has an equal share of the chunks. When a relay fails, only its own chunks move.
    """
    return max(relays, key=lambda relay: hashlib.blake2b(digest + relay.encode(), digest_size=8).digest())


def holder_name(replica_id: str) -> str:
    """Return a name for ``replica_id`` that is valid at a relay."""
    return hashlib.blake2b(replica_id.encode(), digest_size=12).hexdigest()
