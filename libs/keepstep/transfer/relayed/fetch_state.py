"""Shared state of the threads of one fetch."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable

from keepstep.connection.http_connection import Endpoint

MAX_FAILURES = 3
"""Failures in a row, after which a peer or the source is not asked again, and a relay only if no other works."""


class FetchState:
    """The state. The lock of ``changed`` and ``work`` guards it and the ``Swarm`` of the fetch.

    Args:
        relays: the relays of the job. Empty: the source takes their place.
    """

    def __init__(self, relays: Iterable[Endpoint]) -> None:
        self.relays = {relay.address: relay for relay in relays}
        lock = threading.RLock()
        self.changed = threading.Condition(lock)
        """Notified when the fetch may be over."""
        self.work = threading.Condition(lock)
        """Notified when a lane may have a chunk to request, too. Waking threads in vain costs more than the chunks."""
        self.failures = defaultdict(int, dict.fromkeys(self.relays, 0))
        """Failures in a row, by address."""
        self.brought: set[str] = set()
        """Senders of chunks: ``RELAY``, ``SOURCE``, names of peers."""
        self.source_lost = ""
        """Why the source is lost; empty: it is not lost."""
        self.closing = False
        """Whether the fetch is about to return. Threads then send no further request."""

    def wake_all(self) -> None:
        """Wake every thread that waits. The caller holds the lock."""
        self.changed.notify_all()
        self.work.notify_all()

    def working_relays(self) -> list[str]:
        """Addresses of the relays that did not fail too often."""
        return [address for address in self.relays if self.failures[address] < MAX_FAILURES]
