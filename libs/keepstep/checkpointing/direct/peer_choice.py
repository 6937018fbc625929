"""Which chunk one of several joiners asks of whom. Pure: time is an argument.

The rules:

* Joiner k of n takes the chunks k, k + n, k + 2n, ... from the relay, in the order in which they are uploaded, and the
  others from the joiners whose they are; so each chunk leaves the relay once, and every uplink works all the time.
* Of what a peer has, the chunk that the fewest others have comes first: soon there are many who have it.
* It asks ``PEERS_AT_ONCE`` peers at a time, and a peer serves as few: what comes quickly is passed on soon, and neither
  an uplink nor a downlink waits for one that is busy with others.
* When nothing else comes for a while it takes more from the relay, one chunk after the other: those who should bring
  them may be slow, or gone.
* The source itself is asked only when ``use_source`` was called: it trains.
* A chunk is asked of one at a time. One that a peer is slow with is taken from it when somebody else has nothing to do;
  one that the relay is slow with, when the source can be asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

PEERS_AT_ONCE = 1
"""With more, every copy takes longer to come, and so to be passed on."""
PEER_PATIENCE_SECONDS = 0.5
PATIENCE_FACTOR = 4.0
"""The while is ``PEER_PATIENCE_SECONDS``, or this many times what the fastest chunk took, if that is longer."""
SLOW_CHUNK_SECONDS = 1.0
SLOW_FACTOR = 4.0
"""A peer is slow with a chunk after ``slow_seconds``, or this many times what one took so far, if that is longer."""
SAMPLE = 64
"""Chunks among which the rarest is looked for."""
RELAY = "relay"
SOURCE = "source"


@dataclass(slots=True)
class _Asked:
    """A chunk on its way."""

    of: str
    since: float


@dataclass(slots=True)
class Swarm:
    """``me`` of ``joiners``: this one's number among those who want the same state. Sets of chunks are bits of an int.

    Sources are named ``RELAY``, ``SOURCE``, or as the peers call themselves.
    """

    chunks: int
    me: int
    joiners: int
    began: float
    done: int = 0
    asked: dict[int, _Asked] = field(default_factory=dict)
    peers: dict[str, int] = field(default_factory=dict)
    """What each of them has."""
    use_source: bool = False
    slow_seconds: float = SLOW_CHUNK_SECONDS
    _todo: int = field(init=False)
    _own: int = field(init=False)
    _came: float = field(init=False)
    _fed: float = field(init=False)
    """When a chunk last came that was this joiner's own, or that a peer brought."""
    _chunk_seconds: float = 0.0
    _fastest: float = 0.0

    def __post_init__(self) -> None:
        self._todo = (1 << self.chunks) - 1
        self._own = sum(1 << chunk for chunk in range(self.me, self.chunks, self.joiners))
        self._came = self._fed = self.began

    def have(self, chunks: int) -> None:
        """These are here already."""
        self.done |= chunks
        self._todo &= ~chunks

    @property
    def finished(self) -> bool:
        return not self._todo and not self.asked

    def idle(self, now: float) -> float:
        """Seconds since the last chunk came."""
        return now - self._came

    def take(self, source: str, now: float) -> int | None:
        """The next chunk to ask of ``source``; None: nothing for now. ``came`` or ``failed`` has to follow."""
        chunk = self._choose(source, now)
        if chunk is not None:
            self._todo ^= 1 << chunk
            self.asked[chunk] = _Asked(source, now)
        return chunk

    def _choose(self, source: str, now: float) -> int | None:
        if source == SOURCE:
            return _first(self._todo) if self.use_source else None
        if source != RELAY:
            return self._rarest(self._todo & self.peers.get(source, 0)) if self._asks_few_peers(now) else None
        if self._todo & self._own:
            return _first(self._todo & self._own)
        if now - self._fed < max(PEER_PATIENCE_SECONDS, PATIENCE_FACTOR * self._fastest):
            return None
        return self._rarest(self._todo)

    def _asks_few_peers(self, now: float) -> bool:
        """One that is slow does not count."""
        asked = (one for one in self.asked.values() if one.of not in (RELAY, SOURCE))
        return sum(now - one.since <= self._slow_after() for one in asked) < PEERS_AT_ONCE

    def _rarest(self, candidates: int) -> int | None:
        """Each joiner begins to look at another place, so that not all ask for the same one."""
        start = self.me * self.chunks // self.joiners
        after = candidates >> start << start
        looked_at = islice(_each(after, candidates ^ after), SAMPLE)
        return min(looked_at, key=lambda one: sum(has >> one & 1 for has in self.peers.values()), default=None)

    def came(self, chunk: int, now: float) -> None:
        """It is here, and verified."""
        asked = self.asked.pop(chunk)
        seconds = now - asked.since
        if asked.of != RELAY or self._own >> chunk & 1:
            self._fed = now
        self._fastest = min(self._fastest or seconds, seconds)
        self._chunk_seconds = 0.8 * (self._chunk_seconds or seconds) + 0.2 * seconds
        self._came = now
        self.done |= 1 << chunk

    def failed(self, chunk: int) -> None:
        """It did not come, or damaged: anybody may be asked."""
        del self.asked[chunk]
        self._todo |= 1 << chunk

    def tells(self, peer: str, has: int) -> None:
        """What a peer has."""
        self.peers[peer] = has & ((1 << self.chunks) - 1)

    def forget(self, peer: str) -> None:
        """It is not asked any more."""
        self.peers.pop(peer, None)

    def slow(self, now: float) -> set[str]:
        """Who has been so slow with a chunk that another should be asked, now that there is nothing else to do."""
        if self._todo:
            return set()
        limit = self._slow_after()
        never = (SOURCE,) if self.use_source else (SOURCE, RELAY)  # it may have to wait for what is uploaded
        return {one.of for one in self.asked.values() if one.of not in never and now - one.since > limit}

    def _slow_after(self) -> float:
        return max(self.slow_seconds, SLOW_FACTOR * self._chunk_seconds)

    def peers_finished(self) -> bool:
        """Whether every peer has all of it."""
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
