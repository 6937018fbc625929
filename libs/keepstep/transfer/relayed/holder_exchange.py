"""Exchange of chunk lists between joiners, through a relay or through the source."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from keepstep.connection.http_connection import BrokenConnection, Connection, Endpoint, Refusal
from keepstep.state.errors import TransferError
from keepstep.transfer.direct import holders
from keepstep.transfer.exchange import Exchange
from keepstep.transfer.peer_choice import Swarm
from keepstep.transfer.relayed.fetch_state import FetchState
from keepstep.transfer.relayed.live_checkpoint import LiveCheckpoint, holder_name
from keepstep.transfer.state_transfer import Transfer
from keepstep_mesh.config.logging import get_logger

MAX_PEERS = 16
"""Other joiners that one joiner asks for chunks."""
HOLDER_REPORT_SECONDS = 0.016
"""Interval between two requests; longer with many joiners."""
HOLDER_REPORT_SECONDS_PER_JOINER = 0.002
BAD_REQUEST = 400

log = get_logger("keepstep.transfer")


class HolderExchange:
    """The exchange of one joiner during one transfer.

    Args:
        joiners: number of joiners of this exchange.
        address: where this joiner serves chunks.
        patience: seconds without a byte, after which a connection counts as broken.
        on_peer: called with the name and the address of each other joiner, once, at most ``MAX_PEERS`` times.
    """

    def __init__(
        self,
        transfer: Transfer,
        state: FetchState,
        swarm: Swarm,
        exchange: Exchange,
        joiners: int,
        address: str,
        patience: float,
        on_peer: Callable[[str, str], None],
    ) -> None:
        self._transfer = transfer
        self._state = state
        self._changed = state.changed
        self._swarm = swarm
        self._checkpoint = LiveCheckpoint(exchange)
        self._name = holder_name(exchange.replica_id)
        self._interval = max(HOLDER_REPORT_SECONDS, HOLDER_REPORT_SECONDS_PER_JOINER * joiners)
        self._address = address
        self._patience = patience
        self._on_peer = on_peer
        self._peers: set[str] = set()
        self.complete = False
        """Whether the other joiners know that this one has all chunks, or no process keeps chunk lists."""

    def run(self) -> None:
        """Exchange lists at a fixed interval, and at once when all chunks are here, until the transfer ends."""
        connection: Connection | None = None
        try:
            while self._transfer.ended is None and not self._state.closing:
                finished = self._swarm.finished
                try:
                    if connection is None:
                        connection = self._transfer.open(self._list_keeper(), self._patience)
                    others = self._exchange(connection)
                    self.complete = finished
                    self._use(others)
                except (BrokenConnection, TransferError) as error:
                    log.debug("exchange of chunk lists failed", step=self._transfer.step, reason=str(error))
                    if not self._state.relays and isinstance(error, Refusal) and error.status == BAD_REQUEST:
                        self.complete = True  # an older source that does not support this request
                        return
                    if connection is not None:
                        self._transfer.close(connection)
                        connection = None
                self._pause(failed=connection is None)
        finally:
            if connection is not None:
                self._transfer.close(connection)

    def _list_keeper(self) -> Endpoint:
        """The process that keeps the list of joiners and their chunks."""
        if not self._state.relays:
            return self._transfer.source
        return self._state.relays[min(self._state.working_relays() or self._state.relays)]

    def _exchange(self, connection: Connection) -> dict[str, tuple[str, int]]:
        """Report the chunks of this joiner, and return the address and chunks of the others by name."""
        has, chunks = self._swarm.done, self._swarm.chunks
        if self._state.relays:
            return self._checkpoint.exchange_holders(connection, self._name, self._address, has, chunks)
        line = holders.joiner_fields(self._name, self._address, has, chunks)
        _, length = connection.ask("GET", f"/holders/{self._transfer.lease}", line)
        others = holders.read_holders(self._transfer.read_short(connection, length))
        with self._changed:
            for gone in self._swarm.peers.keys() - others.keys():  # it no longer serves chunks
                self._swarm.forget(gone)
        return others

    def _use(self, others: Mapping[str, tuple[str, int]]) -> None:
        for name, (address, _) in others.items():
            if name not in self._peers and len(self._peers) < MAX_PEERS:
                self._peers.add(name)
                self._on_peer(name, address)
        with self._changed:
            for name, (_, has) in others.items():
                if name in self._swarm.peers:
                    self._swarm.set_peer_chunks(name, has)
            if self._swarm.peers_finished():
                self._changed.notify_all()
            if self._swarm.can_ask_peer(time.monotonic()):
                self._state.work.notify_all()

    def _pause(self, *, failed: bool) -> None:
        """Wait for the next request. The interval is shorter once the others know that this joiner is complete."""

        def over() -> bool:
            unreported = self._swarm.finished and not self.complete
            return self._transfer.ended is not None or self._state.closing or (unreported and not failed)

        with self._changed:
            self._changed.wait_for(over, self._interval / 4 if self.complete else self._interval)
