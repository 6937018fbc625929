"""A joiner's part: the manifest from its source, the chunks from the relays and the other joiners, and, when they do
not come from there, from the source after all. Where no relay is known the source stands in for it: it sends each chunk
once, and the joiners that heal from it learn from it what the others have.

Each lane is a thread that asks ``Swarm`` for the next chunk to get from one kind of source, and receives it in place.
One more tells a relay what is here and learns what the others have. The calling thread looks after the lanes; when all
is here it waits a little for joiners that are fetching from it: the next step begins with them.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import NoReturn, Protocol

from keepstep.checkpointing.direct import holders
from keepstep.checkpointing.direct.connection import BrokenConnection, Connection, Endpoint, Refusal
from keepstep.checkpointing.direct.http_client import Fetch
from keepstep.checkpointing.direct.peer_choice import RELAY, SOURCE, Swarm
from keepstep.checkpointing.direct.receiving import ChunkReceiver
from keepstep.checkpointing.errors import TransferError, TransferTimeout
from keepstep.checkpointing.relayed.relay_client import LiveCheckpoint, holder_name, home
from keepstep.checkpointing.state.restoring import Spare
from keepstep.checkpointing.transport import Exchange, Progress
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.net.backoff import Backoff
from keepstep_mesh.protocol.manifest import CHUNK_BYTES, chunk_length
from keepstep_mesh.security.tokens import ClientToken

RELAY_STREAMS = 2
"""Of one joiner. Each of several has one: what comes one after the other can be passed on sooner."""
SOURCE_STREAMS = 2
MAX_PEERS = 16
"""Joiners that one asks."""
HOLDER_REPORT_SECONDS = 0.016
"""Between two words with the relay about who has what; more where there are many joiners."""
HOLDER_REPORT_SECONDS_PER_JOINER = 0.002
LANE_POLL_SECONDS = 0.01
"""A lane that has nothing to ask for looks again after that."""
CHUNK_WAIT_SECONDS = 2
"""The relay waits so long for a chunk that is still to be uploaded."""
FETCH_PATIENCE_SECONDS = 3.0
"""Without a chunk from anywhere, after which the source is asked too; without a byte, after which a connection counts
as broken.
"""
LOST_SECONDS = 10.0
"""Without a chunk from anywhere, after which a transfer whose source is lost is given up."""
SLOW_SOURCE_SECONDS = 10.0
"""Without a relay: there is nobody with bandwidth to spare, so what comes slowly is not asked of another."""
LOST_ALONE_SECONDS = 1.0
"""The same without a relay: no other process can upload the chunks that all joiners miss."""
LEASE_WORDS = 4
"""A byte is taken from a source that is not needed yet so often in ``timeout``."""
CHUNK_BACKOFF = Backoff(first=0.1, most=1.0)
MAX_FAILURES = 3
"""In a row, after which a peer, or the source, is not asked any more, and a relay only when no other works."""
LINGER_SHARE = 0.25
"""Of the time that the transfer took."""
LINGER_IDLE_SECONDS = 0.2
"""Without having sent anything to another joiner."""
LINGER_TOGETHER_SECONDS = 0.5
"""The same where everybody waits until all have healed; then there is no other limit."""
BAD_REQUEST, NOT_HERE, NOT_YET = 400, 404, 503

log = get_logger("keepstep.checkpointing")


@dataclass(frozen=True)
class _Lane:
    """``where``: whom to ask for a chunk, the target, and a header line. ``queued``: called with a chunk while its
    request waits for its turn there; None: there are no turns.
    """

    of: str
    where: Callable[[int], tuple[Endpoint, str, str]]
    patience: float = FETCH_PATIENCE_SECONDS
    queued: Callable[[int], None] | None = None


class _Elsewhere(BrokenConnection):
    """A chunk that the source would send later is at another joiner now."""


class ChunkServer(Protocol):
    """Serves other joiners what is here already."""

    served_at: float
    """When it last sent a part of it; monotonic time."""

    def lend(self, chunks: Callable[[bytes], list[memoryview] | None] | None) -> None:
        """Serves the memory that ``chunks`` gives for a digest; None: no more."""


class RelayFetch(Fetch):
    """``relays``: none where the source stands in. ``server``, at ``address``: where this joiner serves others, if
    there are others.
    """

    def __init__(
        self,
        base_url: str,
        exchange: Exchange,
        relays: list[Endpoint],
        server: ChunkServer,
        address: str,
        timeout: float,
        *,
        token: ClientToken,
        progress: Progress | None,
        limit: float | None = None,
        spare: Spare | None = None,
    ) -> None:
        super().__init__(
            base_url, exchange.step, timeout, token=token, streams=1, progress=progress, limit=limit, spare=spare
        )
        self._exchange = exchange
        self._joiners = exchange.joiners if relays else exchange.beside
        self._alone = len(self._joiners) == 1
        self._relays = {relay.address: relay for relay in relays}
        self._server = server
        self._address = address
        self._token = token
        self._checkpoint = LiveCheckpoint(exchange)
        self._changed = threading.Condition(self._lock)
        self._failures = defaultdict(int, dict.fromkeys(self._relays, 0))
        """In a row, by address."""
        self._connections: defaultdict[str, set[Connection]] = defaultdict(set)
        """Those of each kind of lane, also some that are closed already."""
        self._peers: set[str] = set()
        self.brought: set[str] = set()
        """Who brought a chunk: ``RELAY``, ``SOURCE``, names of peers."""
        self._told_all = self._alone
        self._told_enough = False
        self._source_lost = ""

    def source_lost(self, reason: str) -> None:
        """The source is gone; once its manifest is here, what the relays and the others have may be enough."""
        self._source_lost = reason
        if not self._has_begun:
            self.abort(f"its source is lost: {reason}")

    def _end(self, error: BaseException) -> None:
        super()._end(error)
        with self._changed:
            self._changed.notify_all()

    def _begin(self, connection: Connection) -> None:
        self._begin_with_manifest(connection)

    def _receive_chunks(self) -> None:
        assert self._manifest is not None
        self._digests = self._manifest.chunk_digests
        here, joiners = self._chunks_here(self._digests), self._joiners
        self._swarm = Swarm(
            len(self._digests), joiners.index(self._exchange.replica_id), len(joiners), time.monotonic()
        )
        self._swarm.have(here)
        if not self._relays:
            self._swarm.slow_seconds = SLOW_SOURCE_SECONDS
        with ThreadPoolExecutor(2 + RELAY_STREAMS + SOURCE_STREAMS + MAX_PEERS, "keepstep-receive") as self._pool:
            try:
                streams = RELAY_STREAMS if self._alone else 1
                if self._relays:
                    self._start(_Lane(RELAY, self._at_relay, CHUNK_WAIT_SECONDS + FETCH_PATIENCE_SECONDS), streams)
                    self._pool.submit(self._run, self._keep_lease)
                else:
                    self._start(_Lane(RELAY, self._at_source, queued=self._look_elsewhere), 1)
                with self._serving(), self._telling():
                    self._look_after_lanes()
                    self._linger()
            except BaseException as error:
                self._end(error)
                raise

    # ---- the calling thread

    def _look_after_lanes(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ended or self._swarm.finished, HOLDER_REPORT_SECONDS)
                if self._ended is not None:
                    raise self._ended
                if self._swarm.finished:
                    return
                now = time.monotonic()
                idle = self._swarm.idle(now)
                for slow in self._swarm.slow(now):
                    if slow != RELAY or not self._source_lost:
                        for connection in self._connections[slow]:
                            connection.interrupt()
            self._deadline.remaining()
            if (
                self._relays
                and not self._swarm.use_source
                and (idle > FETCH_PATIENCE_SECONDS or not self._working_relays())
            ):
                self._ask_source()
            if self._source_lost and idle > (LOST_SECONDS if self._relays else LOST_ALONE_SECONDS):
                raise TransferError(f"the source is lost ({self._source_lost}), and nobody else has the rest")

    def _ask_source(self) -> None:
        log.info("the source itself is asked", step=self._step, source=self._source.address)
        self._swarm.use_source = True
        self._start(_Lane(SOURCE, self._at_source, queued=lambda _chunk: None), SOURCE_STREAMS)

    def _keep_lease(self) -> None:
        """The source ends a lease on which nothing was taken for its timeout; it may be asked for the rest later."""

        def over() -> bool:
            return self._ended is not None or self._told_enough or self._swarm.finished or bool(self._source_lost)

        while True:
            with self._changed:
                if self._changed.wait_for(over, self._deadline.seconds / LEASE_WORDS):
                    return
            try:
                with self._connect(self._source, FETCH_PATIENCE_SECONDS) as connection:
                    _, length = connection.ask("GET", f"/lease/{self._lease}", "Range: bytes=0-0\r\n")
                    connection.read(min(length, 1))
            except (BrokenConnection, TransferError) as error:
                log.debug("the lease at the source was not kept", step=self._step, reason=str(error))

    def _linger(self) -> None:
        """Until all have all of it, and the others know that this one has, or they ask nothing any more."""
        now = began = time.monotonic()
        end, idle = began + LINGER_SHARE * (began - self._swarm.began), LINGER_IDLE_SECONDS
        if self._exchange.together:
            end, idle = math.inf, LINGER_TOGETHER_SECONDS

        def over() -> bool:
            return self._ended is not None or (self._told_all and self._swarm.peers_finished())

        with self._changed:
            while not over() and now < min(end, max(began, self._server.served_at) + idle):
                self._changed.wait_for(over, HOLDER_REPORT_SECONDS)
                now = time.monotonic()

    @contextlib.contextmanager
    def _serving(self) -> Iterator[None]:
        if not self._alone:
            places: defaultdict[bytes, int] = defaultdict(int)
            for chunk, digest in enumerate(self._digests):
                places[digest] |= 1 << chunk

            def lent(digest: bytes) -> list[memoryview] | None:
                here = places.get(digest, 0) & self._swarm.done
                return list(self._destination.segments(here.bit_length() - 1)) if here else None

            self._server.lend(lent)
        try:
            yield
        finally:
            self._server.lend(None)

    @contextlib.contextmanager
    def _telling(self) -> Iterator[None]:
        if not self._alone:
            self._pool.submit(self._run, self._tell)
        try:
            yield
        finally:
            with self._changed:
                self._told_enough = True
                self._changed.notify_all()
                for connection in self._open:  # no lane receives any more
                    connection.interrupt()

    def _tell(self) -> None:
        """Says to a relay what is here, at once when it is all, and learns what others have, until the end."""
        connection: Connection | None = None
        swarm = self._swarm
        try:
            while self._ended is None and not self._told_enough:
                finished = swarm.finished
                try:
                    if connection is None:
                        connection = self._opened(self._teller(), FETCH_PATIENCE_SECONDS)
                    others = self._tell_once(connection)
                    self._told_all = finished
                    self._meet(others)
                except (BrokenConnection, TransferError) as error:
                    log.debug("cannot learn who else has the state", step=self._step, reason=str(error))
                    if not self._relays and isinstance(error, Refusal) and error.status == BAD_REQUEST:
                        self._told_all = True  # an older source, that knows no such request
                        return
                    if connection is not None:
                        self._close(connection)
                        connection = None
                self._pause_telling(in_vain=connection is None)
        finally:
            if connection is not None:
                self._close(connection)

    def _teller(self) -> Endpoint:
        """The process that tells joiners which chunks the others hold."""
        if not self._relays:
            return self._source
        return self._relays[min(self._working_relays() or self._relays)]

    def _tell_once(self, connection: Connection) -> dict[str, tuple[str, int]]:
        """Address and chunks of the others, by name."""
        has, chunks = self._swarm.done, self._swarm.chunks
        if self._relays:
            return self._checkpoint.hold(connection, self._address, has, chunks)
        line = holders.told(holder_name(self._exchange.replica_id), self._address, has, chunks)
        _, length = connection.ask("GET", f"/holders/{self._lease}", line)
        others = holders.read_holders(self._read_short(connection, length))
        with self._changed:
            for gone in self._swarm.peers.keys() - others.keys():  # it serves nobody any more
                self._swarm.forget(gone)
        return others

    def _pause_telling(self, *, in_vain: bool) -> None:
        """Shorter once all is told: then it waits for what it learns, no more. ``in_vain``: the relay did not hear."""
        pause = max(HOLDER_REPORT_SECONDS, HOLDER_REPORT_SECONDS_PER_JOINER * len(self._joiners))

        def over() -> bool:
            untold = self._swarm.finished and not self._told_all
            return self._ended is not None or self._told_enough or (untold and not in_vain)

        with self._changed:
            self._changed.wait_for(over, pause / 4 if self._told_all else pause)

    def _meet(self, others: dict[str, tuple[str, int]]) -> None:
        for name, (address, _) in others.items():
            if name not in self._peers and len(self._peers) < MAX_PEERS:
                self._peers.add(name)
                try:
                    peer = Endpoint.of(address, self._token.peer_headers)
                except ValueError as error:
                    log.warning("another joiner cannot be asked", step=self._step, reason=str(error))
                    continue
                with self._changed:
                    self._swarm.tells(name, 0)
                self._start(_Lane(name, self._at_peer(peer)), 1)
        with self._changed:
            for name, (_, has) in others.items():
                if name in self._swarm.peers:
                    self._swarm.tells(name, has)
            self._changed.notify_all()

    # ---- lanes

    def _start(self, lane: _Lane, number: int) -> None:
        with self._changed:
            if not self._told_enough:
                for _ in range(number):
                    self._pool.submit(self._run, self._receive_on, lane)

    def _at_relay(self, chunk: int) -> tuple[Endpoint, str, str]:
        digest = self._digests[chunk]
        relay = home(digest, self._working_relays() or list(self._relays))
        return self._relays[relay], f"/v1/chunks/{digest.hex()}?wait={CHUNK_WAIT_SECONDS}", ""

    def _at_source(self, chunk: int) -> tuple[Endpoint, str, str]:
        first = chunk * CHUNK_BYTES
        last = first + chunk_length(self._destination.pack_bytes, chunk) - 1
        return self._source, f"/lease/{self._lease}", f"Range: bytes={first}-{last}\r\n"

    def _at_peer(self, peer: Endpoint) -> Callable[[int], tuple[Endpoint, str, str]]:
        def where(chunk: int) -> tuple[Endpoint, str, str]:
            return peer, f"/chunk/{self._digests[chunk].hex()}", ""

        return where

    def _working_relays(self) -> list[str]:
        return [address for address in self._relays if self._failures[address] < MAX_FAILURES]

    def _run(self, work: Callable[..., None], *arguments: _Lane) -> None:
        """On a thread of the pool: what it raises ends the transfer."""
        try:
            work(*arguments)
        except BaseException as error:
            self._end(error)
            raise

    def _receive_on(self, lane: _Lane) -> None:
        receiver = ChunkReceiver(self._destination)
        connections: dict[str, Connection] = {}
        try:
            while (chunk := self._next(lane.of)) is not None:
                to, target, line = lane.where(chunk)
                try:
                    if to.address not in connections:
                        connections[to.address] = self._opened(to, lane.patience)
                        with self._changed:
                            self._connections[lane.of].add(connections[to.address])
                    self._ask_for(connections[to.address], lane, chunk, target, line, receiver)
                except (BrokenConnection, TransferError) as problem:
                    with self._changed:
                        self._swarm.failed(chunk)
                        self._changed.notify_all()
                        ended = self._ended
                    if ended is not None or isinstance(problem, TransferTimeout):
                        raise ended or problem from problem
                    if not isinstance(problem, Refusal) and to.address in connections:
                        self._close(connections.pop(to.address))
                    if not self._goes_on(lane.of, to.address, problem):
                        return
                else:
                    with self._changed:
                        self._swarm.came(chunk, time.monotonic())
                        self.brought.add(lane.of if self._relays or lane.of != RELAY else SOURCE)
                        self._failures[to.address] = 0
                        self._changed.notify_all()
        finally:
            for connection in connections.values():
                self._close(connection)

    def _next(self, source: str) -> int | None:
        """The next chunk for a lane; None when there will be none any more."""
        with self._changed:
            while self._ended is None and not self._swarm.finished:
                if (chunk := self._swarm.take(source, time.monotonic())) is not None:
                    return chunk
                self._changed.wait(LANE_POLL_SECONDS)
        return None

    def _look_elsewhere(self, chunk: int) -> None:
        with self._changed:
            if any(has >> chunk & 1 for has in self._swarm.peers.values()):
                raise _Elsewhere(f"chunk {chunk} is at another joiner by now")

    def _ask_for(
        self, connection: Connection, lane: _Lane, chunk: int, target: str, line: str, receiver: ChunkReceiver
    ) -> None:
        queued = None if lane.queued is None else partial(lane.queued, chunk)
        _, length = connection.ask("GET", target, line, queued=queued)
        expected = chunk_length(self._destination.pack_bytes, chunk)
        if length != expected:
            raise BrokenConnection(f"{length} bytes came where {expected} were asked for")
        self._receive_chunk(connection, chunk, receiver)

    def _note_damage(self, connection: Connection, chunk: int) -> NoReturn:
        """Whoever sent it fails; the chunk may come from others."""
        log.warning("chunk arrived damaged", step=self._step, chunk=chunk, sender=connection.address)
        raise BrokenConnection(f"chunk {chunk} arrived damaged")

    def _goes_on(self, source: str, address: str, problem: Exception) -> bool:
        """After something went wrong: whether the lane asks again. To be told to ask again later is no failure."""
        pause = LANE_POLL_SECONDS
        later = {RELAY: (NOT_HERE, NOT_YET) if self._relays else (), SOURCE: ()}.get(source, (NOT_YET,))
        with self._changed:
            if not (isinstance(problem, _Elsewhere) or (isinstance(problem, Refusal) and problem.status in later)):
                self._failures[address] += 1
                failures = self._failures[address]
                pause = CHUNK_BACKOFF.seconds(failures)
                log.info("no chunk", step=self._step, of=source, at=address, failures=failures, reason=str(problem))
            if source == RELAY and not self._relays and self._failures[address] >= MAX_FAILURES:
                self._source_lost = self._source_lost or str(problem)
            if source == RELAY or self._failures[address] < MAX_FAILURES:
                self._changed.wait_for(lambda: self._ended or self._swarm.finished, pause)
                return True
            if source == SOURCE:
                self._source_lost = self._source_lost or str(problem)
            else:
                self._swarm.forget(source)
            return False
