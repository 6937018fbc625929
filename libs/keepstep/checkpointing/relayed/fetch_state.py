"""State that the threads of one fetch share."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable

from keepstep.checkpointing.direct.connection import Endpoint

MAX_FAILURES = 3
"""Failures in a row, after which a peer or the source is not asked again, and a relay only when no other works."""


class FetchState:
    """``changed`` guards all of it, and the ``Swarm`` of the fetch. It is notified of every change.

    Args:
        relays: the relays of the job; none: the source stands in for them.
    """

    def __init__(self, relays: Iterable[Endpoint]) -> None:
        self.relays = {relay.address: relay for relay in relays}
        self.changed = threading.Condition()
        self.failures = defaultdict(int, dict.fromkeys(self.relays, 0))
        """In a row, by address."""
        self.brought: set[str] = set()
        """Senders of chunks: ``RELAY``, ``SOURCE``, names of peers."""
        self.source_lost = ""
        """Why the source is lost; empty: it is not."""
        self.closing = False
        """Whether the fetch is about to return: no thread asks for more."""

    def working_relays(self) -> list[str]:
        """Addresses of the relays that did not fail too often."""
        return [address for address in self.relays if self.failures[address] < MAX_FAILURES]
