"""What a relay knows and decides. Pure: events in, decisions out, time is an argument.

The rules that this file keeps:

* A checkpoint is one pack for each rank. It begins, its ranks say what their packs are made of (``Table``), chunks
  come in any order and from anybody, and it is committed when every chunk of every table is here and was made to last
  (``Seal``, ``Sealed``). Nothing that is incomplete is ever committed.
* A chunk is kept while a table names it, and only then is it taken. Equal chunks are one.
* The first root of a rank counts; who comes with another is told so, and its table is not taken.
* An upload ends when a rank that has not reported says nothing for ``upload_seconds``, or reports an error. A chunk
  that comes is a sign of life of every rank whose table has it.
* A live state may be shared by several relays, each of which has a part. When all ranks say that the rest is at others,
  nobody is waited for, and the part is dropped when nobody has read from it for ``reading_seconds``.
* Of what is committed, dropped without being asked are only checkpoints beyond the count or age of their kind, never
  the newest of a job and kind, never one that was read from within ``reading_seconds``; for want of room only live ones
  beyond the count, that nobody reads from at that moment. The newest live one goes when nobody used it for
  ``live_ttl_seconds``: the job is over. A durable one never goes for that.
* A chunk is in the durable tier while one of its checkpoints is copied there, and goes from it with the last of them.
* Memory is taken back from chunks that nobody reads now and that all their checkpoints have in another tier: first
  from those that no open upload or transfer needs, the longest unused first.

Duties of the shell: feed events in their order; send ``Tick`` when ``deadline()`` has passed; carry out decisions in
their order, before anybody is answered; say ``ChunkCame`` for nothing that was not verified.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice

from keepstep_relay.core.events import (
    Aborted,
    Begun,
    Cause,
    ChunkCame,
    ChunkLetGo,
    ChunkLost,
    ChunkTaken,
    CommitAsked,
    Copied,
    Decision,
    Drop,
    Event,
    Evict,
    Facts,
    Forget,
    HolderSaid,
    Keep,
    Key,
    Kind,
    Limits,
    RankReported,
    ReadFrom,
    RefusedError,
    Removed,
    RoomWanted,
    RootSaid,
    Seal,
    Sealed,
    SealFailed,
    State,
    Table,
    TableCame,
    Tick,
    Tier,
    Wake,
)
from keepstep_relay.core.eviction import evictions
from keepstep_relay.core.inventory import MAX_ENDED, NEVER, Checkpoint, Chunk, Ended, Holder
from keepstep_relay.core.retention import retirements

MAX_NAMED = 10
"""Silent ranks, in a reason."""


class RelayCore:
    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.checkpoints: dict[Key, Checkpoint] = {}
        self.chunks: dict[bytes, Chunk] = {}
        self.ended: OrderedDict[Key, Ended] = OrderedDict()
        self.memory: OrderedDict[bytes, None] = OrderedDict()
        """Chunks in memory, the longest unused first."""
        self.tier_bytes = dict.fromkeys(Tier, 0)

    def step(self, event: Event, now: float) -> list[Decision]:
        """Raises ``RefusedError`` when it says no; then nothing has changed."""
        match event:
            case Begun(key, facts):
                return self._begin(key, facts, now)
            case RootSaid():
                return self._root(event, now)
            case TableCame(key, rank, table):
                return self._table(key, rank, table, now)
            case ChunkCame(digest, tier):
                return self._came(digest, tier, now)
            case ChunkLost(digest, tier):
                return self._lost(digest, tier, now)
            case Copied(key):
                return self._copied(key, now)
            case RankReported():
                return self._report(event, now)
            case CommitAsked(key):
                return self._commit(key)
            case Sealed(key):
                return self._sealed(key, now)
            case SealFailed(key):
                return self._seal_failed(key, now)
            case Aborted(key, reason):
                return self._abort(key, reason, now)
            case Removed(key, reason):
                return self._end(self.checkpoint(key), reason, None, now)
            case ReadFrom(key):
                self.checkpoint(key).read_until = now + self.limits.reading_seconds
                return []
            case ChunkTaken(digest):
                return self._taken(digest, now)
            case ChunkLetGo(digest):
                return self._let_go(digest)
            case HolderSaid():
                return self._holder(event, now)
            case RoomWanted(size):
                return self._room(size, now)
            case Tick():
                return self._tick(now)

    def restore(self, key: Key, facts: Facts, tables: dict[int, Table], committed_at: float | None, now: float) -> None:
        """Takes up a checkpoint that was written down. Its chunks come after it, one ``ChunkCame`` each."""
        one = Checkpoint(key, facts, now)
        self.checkpoints[key] = one
        for rank, table in tables.items():
            self._use(one, rank, table)
        one.committed_at = committed_at

    # ---- questions

    def checkpoint(self, key: Key) -> Checkpoint:
        """Raises ``RefusedError``: unknown, or gone with the reason."""
        one = self.checkpoints.get(key)
        if one is None:
            if (ended := self.ended.get(key)) is not None:
                raise RefusedError(Cause.GONE, f"{key} is gone: {ended.reason}")
            raise RefusedError(Cause.UNKNOWN, f"there is no {key}")
        return one

    def is_here(self, digest: bytes) -> bool:
        chunk = self.chunks.get(digest)
        return chunk is not None and bool(chunk.tiers)

    def wanted(self, digest: bytes) -> int | None:
        """Length of a chunk that a table names; None for any other."""
        chunk = self.chunks.get(digest)
        return chunk.length if chunk is not None and chunk.users else None

    def to_come(self, digest: bytes) -> bool:
        """Whether a chunk that is not here is about to be uploaded."""
        chunk = self.chunks.get(digest)
        return chunk is not None and any(self.checkpoints[key].committed_at is None for key, _ in chunk.users)

    def lacking(self, table: Table) -> tuple[bytes, int]:
        """(bitmap of the chunks that are not here, their number)."""
        bitmap, count = bytearray(-(-len(table.digests) // 8)), 0
        for number, digest in enumerate(table.digests):
            if not self.chunks[digest].tiers:
                bitmap[number // 8] |= 1 << number % 8
                count += 1
        return bytes(bitmap), count

    def lacking_bytes(self, one: Checkpoint) -> int:
        """Of all its ranks that have a table."""
        lacking = (rank for rank, count in one.lacking.items() if count)
        chunks = (self.chunks[digest] for rank in lacking for digest in set(one.tables[rank].digests))
        return sum(chunk.length for chunk in chunks if not chunk.tiers)

    def deadline(self) -> float:
        """When something ends by itself; ``NEVER`` if nothing does."""
        ends = [NEVER]
        for one in self.checkpoints.values():
            if one.is_part:
                ends.append(one.read_until)
            elif one.committed_at is None and not one.sealing:
                ends.append(one.longest_silent_since + self.limits.upload_seconds)
            ends.extend(holder.until for holder in one.holders.values())
        ends.extend(due.at for due in retirements(self.checkpoints.values(), self.limits))
        return min(ends)

    # ---- an upload

    def _begin(self, key: Key, facts: Facts, now: float) -> list[Decision]:
        known = self.checkpoints.get(key)
        if known is not None:
            if known.facts != facts:
                raise RefusedError(Cause.CONFLICT, f"{key} is there already, with {known.facts}, not {facts}")
            return []
        if facts.ranks > self.limits.ranks:
            raise RefusedError(Cause.FULL, f"{key} has {facts.ranks} ranks; this relay takes {self.limits.ranks}")
        if len(self.checkpoints) >= self.limits.checkpoints:
            raise RefusedError(
                Cause.FULL,
                f"this relay holds its {self.limits.checkpoints} checkpoints; remove some (keepstep checkpoint rm) or "
                f"let it keep fewer (--keep-live, --keep-durable, --live-ttl)",
            )
        self.ended.pop(key, None)
        self.checkpoints[key] = Checkpoint(key, facts, now)
        return [Keep(key), Wake((key,))]

    def _upload(self, key: Key) -> Checkpoint:
        one = self.checkpoint(key)
        if one.committed_at is not None:
            raise RefusedError(Cause.CONFLICT, f"{key} is committed; it does not change any more")
        return one

    def _rank(self, one: Checkpoint, rank: int) -> None:
        if not 0 <= rank < one.facts.ranks:
            raise RefusedError(Cause.CONFLICT, f"{one.key} has ranks 0 to {one.facts.ranks - 1}, not {rank}")

    def _root(self, said: RootSaid, now: float) -> list[Decision]:
        one = self.checkpoint(said.key)
        self._rank(one, said.rank)
        roots = one.roots.setdefault(said.rank, {})
        if said.producer not in roots and len(roots) >= self.limits.producers:
            raise RefusedError(Cause.FULL, f"{self.limits.producers} producers said a root of rank {said.rank} already")
        roots[said.producer] = said.root
        if one.root(said.rank) == said.root:
            self._alive(one, said.rank, now)
        return []

    def _table(self, key: Key, rank: int, table: Table, now: float) -> list[Decision]:
        one = self.checkpoint(key)
        self._rank(one, rank)
        counts = one.root(rank)
        if counts is not None and counts != table.root:
            raise RefusedError(
                Cause.CONFLICT,
                f"rank {rank} of {key} has root {counts.hex()}, this manifest has {table.root.hex()}: another state",
            )
        if rank in one.tables:
            self._alive(one, rank, now)
            return []
        self._upload(key)
        new: dict[bytes, int] = {}
        for number, digest in enumerate(table.digests):
            length, known = table.length(number), self.chunks.get(digest)
            expected = known.length if known is not None else new.setdefault(digest, length)
            if expected != length:
                raise RefusedError(
                    Cause.CONFLICT,
                    f"chunk {number} of rank {rank} is {length} bytes; the one of that digest that is known here is "
                    f"{expected}",
                )
        if len(self.chunks) + len(new) > self.limits.chunks:
            raise RefusedError(
                Cause.FULL,
                f"{key} needs {len(new)} more chunks; this relay has {len(self.chunks)} and keeps {self.limits.chunks}",
            )
        self._use(one, rank, table)
        self._alive(one, rank, now)
        return [Wake((key, *new))]

    def _use(self, one: Checkpoint, rank: int, table: Table) -> None:
        one.tables[rank] = table
        for number, digest in enumerate(table.digests):
            chunk = self.chunks.setdefault(digest, Chunk(table.length(number)))
            chunk.users.add((one.key, rank))
        one.lacking[rank] = sum(not self.chunks[digest].tiers for digest in set(table.digests))

    def _alive(self, one: Checkpoint, rank: int, now: float) -> None:
        if one.committed_at is None and rank not in one.reported:
            one.heard[rank] = now

    def _came(self, digest: bytes, tier: Tier, now: float) -> list[Decision]:
        chunk = self.chunks.get(digest)
        if chunk is None:
            return [Drop((digest,))]
        came = not chunk.tiers
        if tier not in chunk.tiers:
            chunk.tiers.add(tier)
            self.tier_bytes[tier] += chunk.length
            if tier is Tier.MEMORY:
                self.memory[digest] = None
        if not came:
            return []
        for key, rank in chunk.users:
            one = self.checkpoints[key]
            one.lacking[rank] -= 1
            one.arrived = True
            one.came_bytes += chunk.length
            one.came_at = now
            one.pace.count(one.came_bytes, now)
            self._alive(one, rank, now)
        return [Wake((digest,))]

    def _copied(self, key: Key, now: float) -> list[Decision]:
        one = self.checkpoint(key)
        one.copied = True
        decisions: list[Decision] = []
        for digest in {digest for digest, _ in one.chunks()}:
            decisions += self._came(digest, Tier.DURABLE, now)
        return decisions

    def _lost(self, digest: bytes, tier: Tier, now: float) -> list[Decision]:
        chunk = self.chunks.get(digest)
        if chunk is None or tier not in chunk.tiers:
            return []
        self._leaves(digest, chunk, tier)
        if not chunk.tiers:
            for key, rank in chunk.users:
                one = self.checkpoints[key]
                one.lacking[rank] += 1
                self._wait_again(one, rank, now)
        return []

    def _leaves(self, digest: bytes, chunk: Chunk, tier: Tier) -> None:
        chunk.tiers.discard(tier)
        self.tier_bytes[tier] -= chunk.length
        if tier is Tier.MEMORY:
            del self.memory[digest]

    def _wait_again(self, one: Checkpoint, rank: int, now: float) -> None:
        """What the rank reported is not so any more."""
        one.reported.discard(rank)
        if one.committed_at is None:
            one.heard.setdefault(rank, now)

    def _report(self, said: RankReported, now: float) -> list[Decision]:
        key, rank = said.key, said.rank
        if said.error is not None:
            self._rank(self._upload(key), rank)
            return self._abort(key, f"rank {rank} failed: {said.error}", now)
        one = self.checkpoint(key)
        self._rank(one, rank)
        if one.committed_at is not None:
            return []
        self._alive(one, rank, now)
        if rank not in one.tables:
            raise RefusedError(Cause.CONFLICT, f"the manifest of rank {rank} of {key} is not here")
        if one.lacking[rank] and not said.part:
            raise RefusedError(Cause.CONFLICT, f"{one.lacking[rank]} chunks of rank {rank} of {key} are not here")
        if said.part and one.facts.kind is not Kind.LIVE:
            raise RefusedError(Cause.CONFLICT, f"{key} is to last: all of it has to come to one relay")
        was_part = one.is_part
        one.part |= said.part
        one.reported.add(rank)
        one.heard.pop(rank, None)
        if len(one.reported) == one.facts.ranks and one.complete:
            return self._commit(key)
        if one.is_part:
            one.read_until = max(one.read_until, now + self.limits.reading_seconds)
        return [one.ended(self.lacking_bytes(one))] if one.is_part and not was_part else []

    def _commit(self, key: Key) -> list[Decision]:
        one = self.checkpoint(key)
        if one.committed_at is not None or one.sealing:
            return []
        if len(one.tables) < one.facts.ranks:
            absent = next(rank for rank in range(one.facts.ranks) if rank not in one.tables)
            raise RefusedError(
                Cause.CONFLICT,
                f"{one.facts.ranks - len(one.tables)} of {one.facts.ranks} manifests of {key} are not here, among them "
                f"that of rank {absent}",
            )
        if not one.complete:
            raise RefusedError(Cause.CONFLICT, f"{sum(one.lacking.values())} chunks of {key} are not here")
        one.sealing = True
        return [Seal(key, tuple(dict.fromkeys(digest for digest, _ in one.chunks())))]

    def _sealed(self, key: Key, now: float) -> list[Decision]:
        one = self._upload(key)
        one.sealing, one.committed_at = False, now
        one.heard.clear()
        return [one.ended(0), Wake((key,)), *self._retire(now)]

    def _seal_failed(self, key: Key, now: float) -> list[Decision]:
        one = self._upload(key)
        one.sealing = False
        for rank in range(one.facts.ranks):
            self._wait_again(one, rank, now)
        return [Wake((key,))]

    # ---- ends

    def _abort(self, key: Key, reason: str, now: float) -> list[Decision]:
        one = self._upload(key)
        if one.sealing:
            raise RefusedError(Cause.CONFLICT, f"{key} is being committed")
        return self._end(one, reason, State.ABORTED, now)

    def _end(
        self, one: Checkpoint, reason: str, state: State | None, now: float, *, is_fault: bool = True
    ) -> list[Decision]:
        if one.sealing:
            raise RefusedError(Cause.CONFLICT, f"{one.key} is being committed")
        told = one.committed_at is not None or one.is_part
        ended = [] if told else [one.ended(self.lacking_bytes(one), reason if is_fault else "")]
        del self.checkpoints[one.key]
        self.ended[one.key] = Ended(reason, state)
        while len(self.ended) > MAX_ENDED:
            self.ended.popitem(last=False)
        for rank, table in one.tables.items():
            for digest in set(table.digests):
                self.chunks[digest].users.discard((one.key, rank))
        digests = []
        for digest in dict.fromkeys(digest for digest, _ in one.chunks()):
            chunk = self.chunks[digest]
            if one.copied and not any(self.checkpoints[key].copied for key, _ in chunk.users):
                self._lost(digest, Tier.DURABLE, now)  # with the copy that it was in
            if not chunk.users:
                digests.append(digest)
        dropped = self._dropped(digests)
        return [*ended, Forget(one.key, reason), *dropped, Wake((one.key, *digests))]

    def _dropped(self, digests: Iterable[bytes]) -> list[Decision]:
        """Of ``digests`` those that nothing needs are gone."""
        gone = []
        for digest in digests:
            chunk = self.chunks[digest]
            if chunk.users or chunk.readers:
                continue
            for tier in tuple(chunk.tiers):
                self._leaves(digest, chunk, tier)
            del self.chunks[digest]
            gone.append(digest)
        return [Drop(tuple(gone))] if gone else []

    def _retire(self, now: float) -> list[Decision]:
        decisions: list[Decision] = []
        for due in list(retirements(self.checkpoints.values(), self.limits)):
            if due.at <= now:
                decisions += self._end(due.checkpoint, due.reason, None, now)
        return decisions

    def _tick(self, now: float) -> list[Decision]:
        decisions: list[Decision] = []
        for one in list(self.checkpoints.values()):
            one.holders = {name: holder for name, holder in one.holders.items() if holder.until > now}
            if one.committed_at is not None or one.sealing:
                continue
            if one.is_part and one.read_until <= now:
                reason = f"it was a part, and nobody read from it for {self.limits.reading_seconds:g} s"
                decisions += self._end(one, reason, None, now)
            elif one.longest_silent_since + self.limits.upload_seconds <= now:
                silent = list(islice(one.silent_since(now - self.limits.upload_seconds), MAX_NAMED + 1))
                ranks = ", ".join(map(str, silent[:MAX_NAMED])) + (" and others" if len(silent) > MAX_NAMED else "")
                reason = f"nothing was heard of rank {ranks} for {self.limits.upload_seconds:g} s"
                is_fault = one.facts.kind is Kind.DURABLE
                decisions += self._end(one, reason, State.ABORTED, now, is_fault=is_fault)
        return decisions + self._retire(now)

    # ---- readers

    def _taken(self, digest: bytes, now: float) -> list[Decision]:
        chunk = self.chunks.get(digest)
        if chunk is None:
            raise RefusedError(Cause.UNKNOWN, f"no checkpoint here has a chunk {digest.hex()}")
        chunk.readers += 1
        if digest in self.memory:
            self.memory.move_to_end(digest)
        for key, _ in chunk.users:
            self.checkpoints[key].read_until = now + self.limits.reading_seconds
        return []

    def _let_go(self, digest: bytes) -> list[Decision]:
        chunk = self.chunks[digest]
        chunk.readers -= 1
        return self._dropped((digest,))

    def _holder(self, said: HolderSaid, now: float) -> list[Decision]:
        one = self.checkpoint(said.key)
        self._rank(one, said.rank)
        table = one.tables.get(said.rank)
        if table is None or len(said.bitmap) != -(-len(table.digests) // 8):
            chunks = "no manifest" if table is None else f"{len(table.digests)} chunks"
            raise RefusedError(
                Cause.CONFLICT, f"a bitmap of {len(said.bitmap)} bytes does not fit: rank {said.rank} has {chunks}"
            )
        if (said.rank, said.name) not in one.holders and len(one.holders) >= self.limits.holders:
            raise RefusedError(Cause.FULL, f"{one.key} has its {self.limits.holders} holders")
        one.holders[said.rank, said.name] = Holder(said.address, said.bitmap, now + self.limits.holder_seconds)
        one.read_until = now + self.limits.reading_seconds
        return []

    def _room(self, size: int, now: float) -> list[Decision]:
        chosen = evictions(self.memory, self.chunks, self.checkpoints, size, now)
        for digest in chosen:
            size -= self.chunks[digest].length
            self._lost(digest, Tier.MEMORY, now)
        decisions: list[Decision] = [Evict(tuple(chosen))] if chosen else []
        for due in list(retirements(self.checkpoints.values(), self.limits)):
            one, held = due.checkpoint, self.tier_bytes[Tier.MEMORY]
            if size > 0 and due.spare and not any(self.chunks[digest].readers for digest, _ in one.chunks()):
                decisions += self._end(one, f"{due.reason}; its room was wanted", None, now)
                size -= held - self.tier_bytes[Tier.MEMORY]
        return decisions
