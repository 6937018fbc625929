"""Chooses which chunk a joiner requests from which source. Pure: time is an argument.

The rules:

* Joiner k of n takes the chunks k, k + n, k + 2n, ... from the relay, in the order of their upload, and all other
  chunks from the joiners that own them. Each chunk leaves the relay once, and every uplink stays busy.
* Rarest first: of the chunks of a peer, a joiner requests the one that the fewest other peers have.
* A joiner requests from ``PEERS_AT_ONCE`` peers at a time, and a peer serves as few. A chunk then arrives quickly and
  can be passed on sooner, and no link waits for one that is busy with others.
* If no other chunk arrives for a while, the joiner takes further chunks from the relay, one after the other: the
  joiners that own them may be slow, or gone.
* The source trains; it serves chunks only if ``use_source`` is set.
* Each chunk is requested from one source at a time. When nothing else is left to request, a chunk that a slow peer
  holds up is requested elsewhere; one that a slow relay holds up only if the source may serve it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

PEERS_AT_ONCE = 1
"""With more, every chunk arrives later, and is passed on later."""
PEER_PATIENCE_SECONDS = 0.5
PATIENCE_FACTOR = 4.0
"""A joiner waits ``PEER_PATIENCE_SECONDS`` for its peers, or this many times the duration of the fastest chunk, if that
is longer."""
SLOW_CHUNK_SECONDS = 1.0
SLOW_FACTOR = 4.0
"""A source is slow with a chunk after ``slow_seconds``, or this many times the mean duration of a chunk, if that is
longer."""
SAMPLE = 64
"""Number of chunks among which the rarest is chosen."""
RELAY = "relay"
SOURCE = "source"


@dataclass(slots=True)
class _Request:
    """A request in progress for a chunk."""

    source: str
    since: float


@dataclass(slots=True)
class Swarm:
    """The chunks of one joiner, and its knowledge of the others. A set of chunks is an int with one bit for each.

    A source of chunks is ``RELAY``, ``SOURCE`` or the name of a peer.

    Args:
        chunks: number of chunks of the state.
        me: number of this joiner among those that receive the same state, from 0.
        joiners: number of these joiners.
        began: when the transfer began.
    """

    chunks: int
    me: int
    joiners: int
    began: float
    done: int = 0
    """The chunks that are here."""
    requests: dict[int, _Request] = field(default_factory=dict)
    """Requests in progress, by chunk."""
    peers: dict[str, int] = field(default_factory=dict)
    """The chunks of each peer."""
    use_source: bool = False
    slow_seconds: float = SLOW_CHUNK_SECONDS
    _todo: int = field(init=False)
    _own: int = field(init=False)
    _arrived_at: float = field(init=False)
    _planned_arrival_at: float = field(init=False)
    """When a chunk last arrived that this joiner owns, or that a peer sent."""
    _chunk_seconds: float = 0.0
    _fastest: float = 0.0

    def __post_init__(self) -> None:
        self._todo = (1 << self.chunks) - 1
        self._own = sum(1 << chunk for chunk in range(self.me, self.chunks, self.joiners))
        self._arrived_at = self._planned_arrival_at = self.began

    def add_present(self, chunks: int) -> None:
        """Add chunks that are here without a request."""
        self.done |= chunks
        self._todo &= ~chunks

    @property
    def finished(self) -> bool:
        """Whether all chunks are here."""
        return not self._todo and not self.requests

    def idle(self, now: float) -> float:
        """Return the seconds since the last chunk arrived."""
        return now - self._arrived_at

    def take(self, source: str, now: float) -> int | None:
        """Return the next chunk to request from ``source``; None: request nothing for now.

        The caller reports the result with ``record_arrival`` or ``failed``.
        """
        chunk = self._choose(source, now)
        if chunk is not None:
            self._todo ^= 1 << chunk
            self.requests[chunk] = _Request(source, now)
        return chunk

    def _choose(self, source: str, now: float) -> int | None:
        if source == SOURCE:
            return _first(self._todo) if self.use_source else None
        if source != RELAY:
            return self._rarest(self._todo & self.peers.get(source, 0)) if self._has_free_slot(now) else None
        if self._todo & self._own:
            return _first(self._todo & self._own)
        if now - self._planned_arrival_at < max(PEER_PATIENCE_SECONDS, PATIENCE_FACTOR * self._fastest):
            return None
        return self._rarest(self._todo)

    def can_ask_peer(self, now: float) -> bool:
        """Return whether a chunk may be requested from some peer."""
        return any(self._todo & has for has in self.peers.values()) and self._has_free_slot(now)

    def _has_free_slot(self, now: float) -> bool:
        """Whether another peer may be asked. A slow request does not count."""
        to_peers = (one for one in self.requests.values() if one.source not in (RELAY, SOURCE))
        return sum(now - one.since <= self._slow_after() for one in to_peers) < PEERS_AT_ONCE

    def _rarest(self, candidates: int) -> int | None:
        """Return the rarest candidate. Each joiner starts the search elsewhere, so that they request different ones."""
        start = self.me * self.chunks // self.joiners
        after = candidates >> start << start
        sample = islice(_each(after, candidates ^ after), SAMPLE)
        return min(sample, key=lambda one: sum(has >> one & 1 for has in self.peers.values()), default=None)

    def record_arrival(self, chunk: int, now: float) -> None:
        """Record that ``chunk`` is here and verified."""
        request = self.requests.pop(chunk)
        seconds = now - request.since
        if request.source != RELAY or self._own >> chunk & 1:
            self._planned_arrival_at = now
        self._fastest = min(self._fastest or seconds, seconds)
        self._chunk_seconds = 0.8 * (self._chunk_seconds or seconds) + 0.2 * seconds
        self._arrived_at = now
        self.done |= 1 << chunk

    def failed(self, chunk: int) -> None:
        """Record that ``chunk`` did not arrive, or arrived damaged. Any source may be asked for it again."""
        del self.requests[chunk]
        self._todo |= 1 << chunk

    def set_peer_chunks(self, peer: str, has: int) -> None:
        """Set the chunks of ``peer``."""
        self.peers[peer] = has & ((1 << self.chunks) - 1)

    def forget(self, peer: str) -> None:
        """Remove ``peer``, so that it is not asked again."""
        self.peers.pop(peer, None)

    def slow(self, now: float) -> set[str]:
        """Return the sources whose chunks should be requested elsewhere; empty while other chunks are left."""
        if self._todo:
            return set()
        limit = self._slow_after()
        never = (SOURCE,) if self.use_source else (SOURCE, RELAY)  # a relay may wait for the upload
        return {one.source for one in self.requests.values() if one.source not in never and now - one.since > limit}

    def _slow_after(self) -> float:
        return max(self.slow_seconds, SLOW_FACTOR * self._chunk_seconds)

    def peers_finished(self) -> bool:
        """Whether every peer has all chunks."""
        return all(has.bit_count() == self.chunks for has in self.peers.values())


def _each(*sets: int) -> Iterator[int]:
    for chunks in sets:
        left = chunks
        while left:
            lowest = left & -left
            yield lowest.bit_length() - 1
            left ^= lowest


def _first(chunks: int) -> int | None:
    return next(_each(chunks), None)
