"""Which chunk one of several joiners asks of whom. Pure: time is an argument.

The rules:

* Joiner k of n takes the chunks k, k + n, k + 2n, ... from the relay, in the order in which they are uploaded, and the
  others from the joiners whose they are; so each chunk leaves the relay once, and every uplink works all the time.
* Of what a peer has, the chunk that the fewest others have comes first: soon there are many who have it.
* When its own are done, and peers have all the others, the relay's uplink is free: a joiner takes from it what they
  have too. When ``PATIENCE_SECONDS`` bring nothing else, it does so earlier, and takes what nobody has, one after the
  other: its owner may be slow, or gone.
* The source itself is asked only when ``use_source`` was called: it trains.
* A chunk is asked of one at a time. One that a peer is slow with is taken from it when somebody else has nothing to do;
  one that the relay is slow with, when the source can be asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

PATIENCE_SECONDS = 0.5
SLOW_SECONDS = 1.0
SLOW_FACTOR = 4.0
"""A peer is slow with a chunk after ``SLOW_SECONDS``, or this many times what one took so far, if that is longer."""
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
    _todo: int = field(init=False)
    _own: int = field(init=False)
    _came: float = field(init=False)
    _fed: float = field(init=False)
    """When a chunk last came that was this joiner's own, or that a peer had."""
    _chunk_seconds: float = 0.0

    def __post_init__(self) -> None:
        self._todo = (1 << self.chunks) - 1
        self._own = sum(1 << chunk for chunk in range(self.me, self.chunks, self.joiners))
        self._came = self._fed = self.began

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
            return self._rarest(self._todo & self.peers.get(source, 0))
        if self._todo & self._own:
            return _first(self._todo & self._own)
        elsewhere = 0
        for has in self.peers.values():
            elsewhere |= has
        elsewhere &= self._todo
        if elsewhere != self._todo and now - self._fed < PATIENCE_SECONDS:
            return None
        return self._rarest(elsewhere or self._todo)

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
        if asked.of != RELAY or self._own >> chunk & 1 or any(has >> chunk & 1 for has in self.peers.values()):
            self._fed = now
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
        limit = max(SLOW_SECONDS, SLOW_FACTOR * self._chunk_seconds)
        never = (SOURCE,) if self.use_source else (SOURCE, RELAY)  # it may have to wait for what is uploaded
        return {one.of for one in self.asked.values() if one.of not in never and now - one.since > limit}

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
