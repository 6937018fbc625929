"""Threads that receive chunks directly into the destination, each from one kind of source."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from keepstep.connection.http_connection import BrokenConnection, Connection, Endpoint, Refusal
from keepstep.state.errors import TransferError, TransferTimeout
from keepstep.transfer.peer_choice import RELAY, SOURCE, Swarm
from keepstep.transfer.receiving import ChunkReceiver
from keepstep.transfer.relayed.fetch_state import MAX_FAILURES, FetchState
from keepstep.transfer.state_transfer import Transfer
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.net.backoff import Backoff
from keepstep_mesh.protocol.manifest import chunk_length
from keepstep_mesh.threads.starting import ThreadPoolExecutor

LANE_POLL_SECONDS = 0.05
"""Interval at which a lane without work looks for some that nothing announces, because time has passed."""
BUSY_SECONDS = 0.01
"""Pause before a peer or a relay that was busy is asked again."""
CHUNK_BACKOFF = Backoff(first=0.1, most=1.0)
NOT_FOUND, UNAVAILABLE = 404, 503

log = get_logger("keepstep.transfer")


@dataclass(frozen=True)
class ChunkRequest:
    """A request for one chunk. ``line``: a header line, with its line end."""

    to: Endpoint
    target: str
    line: str = ""


@dataclass(frozen=True)
class Lane:
    """How to receive chunks from one source.

    Args:
        of: ``RELAY``, ``SOURCE`` or the name of a peer.
        request: the request for a chunk.
        patience: seconds without a byte, after which a connection counts as broken.
        queued: called with a chunk while its request waits in the queue of the source. None: the source has no queue.
    """

    of: str
    request: Callable[[int], ChunkRequest]
    patience: float
    queued: Callable[[int], None] | None = None


class ElsewhereError(BrokenConnection):
    """Another joiner now has the chunk that this request waits for."""


class Lanes:
    """The lanes of one transfer.

    Args:
        swarm: decides which chunk each lane asks for.
        pool: runs the lanes; every lane ends when the transfer ends or is complete.
    """

    def __init__(self, transfer: Transfer, state: FetchState, swarm: Swarm, pool: ThreadPoolExecutor) -> None:
        assert transfer.manifest is not None
        self._transfer = transfer
        self._state = state
        self._changed = state.changed
        self._swarm = swarm
        self._pool = pool
        self._digests = transfer.manifest.chunk_digests
        self._connections: defaultdict[str, set[Connection]] = defaultdict(set)
        """Connections by ``Lane.of``, including closed ones."""

    def start(self, lane: Lane, number: int = 1) -> None:
        """Run ``lane`` on ``number`` threads."""
        with self._changed:
            if not self._state.closing:
                for _ in range(number):
                    self.run(self._receive, lane)

    def run(self, work: Callable[..., None], *arguments: Any) -> None:
        """Run ``work`` on a thread of the pool. An error ends the transfer."""
        self._pool.submit(self._run, work, *arguments)

    def _run(self, work: Callable[..., None], *arguments: Any) -> None:
        try:
            work(*arguments)
        except BaseException as error:
            self._transfer.end(error)
            raise

    def interrupt(self, of: str) -> None:
        """End every request of the lanes with this ``of``. The caller holds ``changed``."""
        for connection in self._connections[of]:
            connection.interrupt()

    def _receive(self, lane: Lane) -> None:
        receiver = ChunkReceiver(self._transfer.destination)
        connections: dict[str, Connection] = {}
        try:
            while (chunk := self._next_chunk(lane.of)) is not None:
                request = lane.request(chunk)
                address = request.to.address
                try:
                    if address not in connections:
                        connections[address] = self._transfer.open(request.to, lane.patience)
                        with self._changed:
                            self._connections[lane.of].add(connections[address])
                    self._receive_chunk(connections[address], lane, chunk, request, receiver)
                except (BrokenConnection, TransferError) as error:
                    self._put_back(chunk, error)
                    if not isinstance(error, Refusal) and address in connections:
                        self._transfer.close(connections.pop(address))
                    if not self._continues(lane.of, address, error):
                        return
                else:
                    self._note_arrival(chunk, lane.of, address)
        finally:
            for connection in connections.values():
                self._transfer.close(connection)

    def _next_chunk(self, of: str) -> int | None:
        """Wait for the next chunk to request. Returns None when the transfer is complete or has ended."""
        with self._changed:
            has_told = False
            while self._transfer.ended is None and not self._swarm.finished:
                now = time.monotonic()
                if (chunk := self._swarm.take(of, now)) is not None:
                    return chunk
                if not has_told and self._swarm.can_ask_peer(now):  # another lane may
                    self._state.work.notify_all()
                has_told = True
                self._state.work.wait(LANE_POLL_SECONDS)
        return None

    def _receive_chunk(
        self, connection: Connection, lane: Lane, chunk: int, request: ChunkRequest, receiver: ChunkReceiver
    ) -> None:
        queued = None if lane.queued is None else partial(lane.queued, chunk)
        _, length = connection.ask("GET", request.target, request.line, queued=queued)
        expected = chunk_length(self._transfer.destination.pack_bytes, chunk)
        if length != expected:
            raise BrokenConnection(f"wrong length of chunk {chunk}: expected {expected} bytes, got {length}")
        digest, size = receiver.receive(connection, chunk)
        if digest != self._digests[chunk]:
            sender = connection.address
            log.warning("chunk arrived damaged", step=self._transfer.step, chunk=chunk, sender=sender)
            raise BrokenConnection(f"chunk {chunk} arrived damaged")
        self._transfer.count(size)

    def _note_arrival(self, chunk: int, of: str, address: str) -> None:
        with self._changed:
            self._swarm.record_arrival(chunk, time.monotonic())
            self._state.brought.add(of if self._state.relays or of != RELAY else SOURCE)
            self._state.failures[address] = 0
            if self._swarm.finished:
                self._state.wake_all()

    def _put_back(self, chunk: int, error: BrokenConnection | TransferError) -> None:
        """Let any lane request ``chunk`` again. Raises ``error`` if it ends the transfer, or the error that did."""
        with self._changed:
            self._swarm.failed(chunk)
            self._state.work.notify_all()
            ended = self._transfer.ended
        if ended is not None or isinstance(error, TransferTimeout):
            raise ended or error from error

    def _continues(self, of: str, address: str, error: Exception) -> bool:
        """Whether the lane continues after ``error``. A relay or a peer that is busy has not failed."""
        state, pause = self._state, BUSY_SECONDS
        later = {RELAY: (NOT_FOUND, UNAVAILABLE) if state.relays else (), SOURCE: ()}.get(of, (UNAVAILABLE,))
        with self._changed:
            if not (isinstance(error, ElsewhereError) or (isinstance(error, Refusal) and error.status in later)):
                state.failures[address] += 1
                failures = state.failures[address]
                pause = CHUNK_BACKOFF.seconds(failures)
                step = self._transfer.step
                log.info("chunk not received", step=step, of=of, at=address, failures=failures, reason=str(error))
            if of == RELAY and not state.relays and state.failures[address] >= MAX_FAILURES:
                state.source_lost = state.source_lost or str(error)
            if of == RELAY or state.failures[address] < MAX_FAILURES:
                self._changed.wait_for(lambda: self._transfer.ended or self._swarm.finished, pause)
                return True
            if of == SOURCE:
                state.source_lost = state.source_lost or str(error)
            else:
                self._swarm.forget(of)
            return False
