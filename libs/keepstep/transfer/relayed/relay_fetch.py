"""Receives the chunks of a joiner from relays and other joiners, and from its source if these do not have them.

Without a relay, the source takes its place: it sends each chunk once, and keeps the chunk lists of its joiners.

Each lane is a thread that receives chunks from one kind of source, in the order that ``Swarm`` chooses. Another thread
exchanges chunk lists with the other joiners. The calling thread supervises the lanes. When all chunks are here, it
continues to serve other joiners for a while, because the next step needs them too.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from collections.abc import Set as AbstractSet

from keepstep.connection.http_connection import BrokenConnection, Endpoint
from keepstep.relay_client.relay_paths import chunk as chunk_path
from keepstep.relay_client.relay_paths import target
from keepstep.state.errors import TransferError
from keepstep.transfer.direct.sending.http_server import CheckpointServer
from keepstep.transfer.exchange import Exchange
from keepstep.transfer.peer_choice import RELAY, SOURCE, Swarm
from keepstep.transfer.relayed.fetch_state import FetchState
from keepstep.transfer.relayed.holder_exchange import HOLDER_REPORT_SECONDS, MAX_PEERS, HolderExchange
from keepstep.transfer.relayed.lanes import LANE_POLL_SECONDS, ChunkRequest, ElsewhereError, Lane, Lanes
from keepstep.transfer.relayed.live_checkpoint import home
from keepstep.transfer.state_transfer import Transfer
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.protocol.manifest import CHUNK_BYTES, chunk_length
from keepstep_mesh.security.tokens import ClientToken
from keepstep_mesh.threads.starting import ThreadPoolExecutor

RELAY_STREAMS = 2
"""Streams of a single joiner. Several joiners use one each: chunks that arrive one by one can be passed on sooner."""
SOURCE_STREAMS = 2
CHUNK_WAIT_SECONDS = 2
"""How long a relay waits for a chunk that is not uploaded yet."""
FETCH_PATIENCE_SECONDS = 3.0
"""Without a chunk for this long, the joiner also requests chunks from the source; without a byte, a connection counts
as broken."""
LOST_SECONDS = 10.0
"""Without a chunk for this long, a transfer whose source is lost is given up."""
LOST_ALONE_SECONDS = 1.0
"""The same without a relay: no other process can upload the chunks that all joiners miss."""
SLOW_SOURCE_SECONDS = 10.0
"""Without a relay, a slow chunk is requested from another joiner only after this long, to save bandwidth."""
LEASE_RENEWALS = 4
"""Renewals of the lease at an unused source, per timeout of the transfer."""
LINGER_SHARE = 0.25
"""Longest linger, as a share of the time that the transfer took."""
LINGER_IDLE_SECONDS = 0.2
"""A joiner stops lingering after this long without sending a chunk."""
LINGER_TOGETHER_SECONDS = 0.5
"""The same if all groups wait until all have healed. ``LINGER_SHARE`` does not apply then."""

log = get_logger("keepstep.transfer")


class RelayedChunks:
    """Receives the chunks of ``transfer`` from relays, other joiners and the source.

    Args:
        exchange: the groups that have, and that need, the state.
        relays: the relays of the job. Empty: the source takes their place.
        server: serves the received chunks to other joiners, at ``address``.
        token: token of the job, for requests to other joiners.
    """

    needs_digests = True

    def __init__(
        self,
        transfer: Transfer,
        exchange: Exchange,
        relays: Iterable[Endpoint],
        server: CheckpointServer,
        address: str,
        token: ClientToken,
    ) -> None:
        self._transfer = transfer
        self._exchange = exchange
        self._state = FetchState(relays)
        self._changed = self._state.changed
        self.brought: AbstractSet[str] = self._state.brought
        """Senders of chunks so far: ``RELAY``, ``SOURCE``, names of peers."""
        self._relays = self._state.relays
        self._joiners = exchange.joiners if self._relays else exchange.beside
        self._is_single = len(self._joiners) == 1
        self._server = server
        self._address = address
        self._token = token

    def source_lost(self, reason: str) -> None:
        """Abort only before the manifest is here: later, the relays and the other joiners may have all chunks."""
        self._state.source_lost = reason
        if not self._transfer.has_begun:
            self._transfer.abort(f"its source is lost: {reason}")

    def wake(self) -> None:
        """See ``ChunkSource``."""
        with self._changed:
            self._state.wake_all()

    def receive_chunks(self) -> None:
        """See ``ChunkSource``."""
        transfer = self._transfer
        assert transfer.manifest is not None
        self._digests = transfer.manifest.chunk_digests
        here, number = transfer.chunks_here(self._digests), len(self._joiners)
        self._swarm = Swarm(
            len(self._digests), self._joiners.index(self._exchange.replica_id), number, time.monotonic()
        )
        self._swarm.add_present(here)
        if not self._relays:
            self._swarm.slow_seconds = SLOW_SOURCE_SECONDS
        with ThreadPoolExecutor(2 + RELAY_STREAMS + SOURCE_STREAMS + MAX_PEERS, "keepstep-receive") as pool:
            self._lanes = Lanes(transfer, self._state, self._swarm, pool)
            self._peers = HolderExchange(
                *(transfer, self._state, self._swarm, self._exchange, number, self._address, FETCH_PATIENCE_SECONDS),
                on_peer=self._add_peer,
            )
            self._peers.complete = self._is_single
            try:
                self._start_lanes()
                with self._serving(), self._exchanging():
                    self._supervise()
                    self._linger()
            except BaseException as error:
                transfer.end(error)
                raise

    def _start_lanes(self) -> None:
        if self._relays:
            streams = RELAY_STREAMS if self._is_single else 1
            self._lanes.start(Lane(RELAY, self._at_relay, CHUNK_WAIT_SECONDS + FETCH_PATIENCE_SECONDS), streams)
            self._lanes.run(self._keep_lease)
        else:
            self._lanes.start(Lane(RELAY, self._at_source, FETCH_PATIENCE_SECONDS, queued=self._look_elsewhere))

    # ---- the calling thread

    def _supervise(self) -> None:
        """Return when all chunks are here."""
        transfer, swarm = self._transfer, self._swarm
        while True:
            with self._changed:
                self._changed.wait_for(lambda: transfer.ended or swarm.finished, LANE_POLL_SECONDS)
                if transfer.ended is not None:
                    raise transfer.ended
                if swarm.finished:
                    return
                now = time.monotonic()
                idle = swarm.idle(now)
                for slow in swarm.slow(now):
                    if slow != RELAY or not self._state.source_lost:
                        self._lanes.interrupt(slow)
                needs_source = bool(self._relays) and (
                    idle > FETCH_PATIENCE_SECONDS or not self._state.working_relays()
                )
            transfer.deadline.remaining()
            if needs_source and not swarm.use_source:
                self._ask_source()
            if self._state.source_lost and idle > (LOST_SECONDS if self._relays else LOST_ALONE_SECONDS):
                raise TransferError(
                    f"the source is lost ({self._state.source_lost}), and no relay or joiner has the missing chunks"
                )

    def _ask_source(self) -> None:
        log.info("asking the source for chunks", step=self._transfer.step, source=self._transfer.source.address)
        self._swarm.use_source = True
        self._lanes.start(
            Lane(SOURCE, self._at_source, FETCH_PATIENCE_SECONDS, queued=lambda _chunk: None), SOURCE_STREAMS
        )

    def _linger(self) -> None:
        """Serve other joiners until all are complete and know that this one is, or until their requests end."""
        now = began = time.monotonic()
        end, idle = began + LINGER_SHARE * (began - self._swarm.began), LINGER_IDLE_SECONDS
        if self._exchange.together:
            end, idle = math.inf, LINGER_TOGETHER_SECONDS

        def over() -> bool:
            return self._transfer.ended is not None or (self._peers.complete and self._swarm.peers_finished())

        with self._changed:
            while not over() and now < min(end, max(began, self._server.served_at) + idle):
                self._changed.wait_for(over, HOLDER_REPORT_SECONDS)
                now = time.monotonic()

    @contextlib.contextmanager
    def _serving(self) -> Iterator[None]:
        if not self._is_single:
            destination, swarm = self._transfer.destination, self._swarm
            places: defaultdict[bytes, int] = defaultdict(int)
            for chunk, digest in enumerate(self._digests):
                places[digest] |= 1 << chunk

            def find_chunk(digest: bytes) -> list[memoryview] | None:
                here = places.get(digest, 0) & swarm.done
                return list(destination.segments(here.bit_length() - 1)) if here else None

            self._server.serve_chunks(find_chunk)
        try:
            yield
        finally:
            self._server.serve_chunks(None)

    @contextlib.contextmanager
    def _exchanging(self) -> Iterator[None]:
        if not self._is_single:
            self._lanes.run(self._peers.run)
        try:
            yield
        finally:
            with self._changed:
                self._state.closing = True
                self._state.wake_all()
            self._transfer.interrupt_connections()  # the lanes have ended

    # ---- other threads

    def _keep_lease(self) -> None:
        """Renew the lease by reading one byte at an interval. The source may be needed later."""
        transfer = self._transfer

        def over() -> bool:
            state = self._state
            return transfer.ended is not None or state.closing or self._swarm.finished or bool(state.source_lost)

        while True:
            with self._changed:
                if self._changed.wait_for(over, transfer.deadline.seconds / LEASE_RENEWALS):
                    return
            try:
                with transfer.connect(transfer.source, FETCH_PATIENCE_SECONDS) as connection:
                    _, length = connection.ask("GET", f"/lease/{transfer.lease}", "Range: bytes=0-0\r\n")
                    connection.read(min(length, 1))
            except (BrokenConnection, TransferError) as error:
                log.debug("lease at the source not renewed", step=transfer.step, reason=str(error))

    def _add_peer(self, name: str, address: str) -> None:
        try:
            peer = Endpoint.of(address, self._token.peer_headers)
        except ValueError as error:
            log.warning("another joiner has no valid address", step=self._transfer.step, reason=str(error))
            return
        with self._changed:
            self._swarm.set_peer_chunks(name, 0)
        self._lanes.start(Lane(name, lambda chunk: self._at_peer(peer, chunk), FETCH_PATIENCE_SECONDS))

    def _at_relay(self, chunk: int) -> ChunkRequest:
        digest = self._digests[chunk]
        relay = home(digest, self._state.working_relays() or list(self._relays))
        return ChunkRequest(self._relays[relay], target(chunk_path(digest), wait=CHUNK_WAIT_SECONDS))

    def _at_source(self, chunk: int) -> ChunkRequest:
        transfer, first = self._transfer, chunk * CHUNK_BYTES
        last = first + chunk_length(transfer.destination.pack_bytes, chunk) - 1
        return ChunkRequest(transfer.source, f"/lease/{transfer.lease}", f"Range: bytes={first}-{last}\r\n")

    def _at_peer(self, peer: Endpoint, chunk: int) -> ChunkRequest:
        return ChunkRequest(peer, f"/chunk/{self._digests[chunk].hex()}")

    def _look_elsewhere(self, chunk: int) -> None:
        with self._changed:
            if any(has >> chunk & 1 for has in self._swarm.peers.values()):
                raise ElsewhereError(f"another joiner has chunk {chunk}")
