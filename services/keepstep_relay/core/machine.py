"""A relay's decisions: events in, decisions out, time is an argument. ``relay_state`` has what it knows. Pure.

Rules:

* A checkpoint is one pack per rank. It begins, its ranks report the chunks of their packs (``Table``), chunks arrive in
  any order from any process, and it is committed when every chunk of every table is here and was made durable
  (``Seal``, ``Sealed``). An incomplete checkpoint is never committed, nor one with the ranks of different producers
  if it must come from one (``Facts.one_producer``), nor one that stays open (``Facts.stays_open``): its ranks, also
  those that have reported, keep it with signs of life.
* A chunk is accepted and kept only while a table names it. Equal chunks are stored once.
* The ranks of an upload may first exchange layouts, which describe what each of them holds. The first layout of a rank
  counts. The core knows only their digests.
* The first root digest of a rank counts; another producer's table with a different root is refused.
* An upload ends when a rank that has not reported is silent for ``upload_seconds``, or reports an error. An arriving
  chunk is a sign of life of every rank whose table names it. A rank that begins within ``upload_seconds`` after such an
  error gets the reason, once; it does not begin the upload again, which the others have left.
* Several relays may share a live state, a part each. When all ranks report that the rest is at other relays, the
  upload is over; the part is dropped once no process has read it for ``reading_seconds``.
* A checkpoint may have several versions. A version that is committed replaces those before it in one step; they are
  dropped once no process has read them for ``reading_seconds``, or if memory runs short.
* Only these committed checkpoints are dropped unasked: those beyond the count or age of their kind. Never the newest of
  a job and kind, and never one that was read within ``reading_seconds``. If memory runs short, live checkpoints beyond
  the count go as soon as no process reads them. If the disk or the number of checkpoints runs short, the longest unused
  live checkpoint goes, also the newest of its job. The newest live checkpoint goes when it was unused for
  ``live_ttl_seconds``, because the job is over. The newest durable one goes only with ``durable_ttl_seconds``, if no
  process used any checkpoint of the job for that time, and then the one before it; never one that a script saved by
  itself, and none in the first day after a start.
* A chunk is in the durable tier while one of its checkpoints is copied there, and leaves it with the last of them.
* Memory is evicted only from chunks without a reader that every one of their checkpoints has in another tier: first
  chunks that no open upload or transfer needs, the least recently used first.

Duties of the shell: feed events in order; send ``Tick`` when ``deadline()`` has passed; carry out decisions in order,
before it answers a request; send ``ChunkArrived`` only for verified chunks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from keepstep_relay.core.checkpoint import MAX_ENDED, Checkpoint, Ended, Holder
from keepstep_relay.core.events import (
    Aborted,
    Begun,
    Cause,
    ChunkArrived,
    ChunkHeld,
    ChunkLost,
    ChunkReleased,
    CommitAsked,
    Copied,
    Decision,
    DiskFull,
    Drop,
    Event,
    Evict,
    Facts,
    Forget,
    HolderReported,
    Keep,
    Key,
    Kind,
    LayoutReported,
    MemoryWanted,
    RankReported,
    RankWaits,
    ReadFrom,
    RefusedError,
    Removed,
    RootReported,
    Seal,
    Sealed,
    SealFailed,
    State,
    Table,
    TableArrived,
    Tick,
    Tier,
    TooLate,
    Wake,
)
from keepstep_relay.core.eviction import evictions
from keepstep_relay.core.expiry import expired
from keepstep_relay.core.relay_state import RelayState
from keepstep_relay.core.retention import OVERWRITTEN, longest_unused, retirements, used_until


class RelayCore(RelayState):
    """Changes the state of one relay."""

    def step(self, event: Event, now: float) -> list[Decision]:
        """Apply an event and return what the shell has to do.

        Raises:
            RefusedError: The event is refused, and nothing has changed.
        """
        match event:
            case Begun():
                return self._begin(event, now)
            case RootReported():
                return self._root(event, now)
            case LayoutReported(key, rank, digest):
                return self._layout(key, rank, digest, now)
            case RankWaits(key, rank):
                one = self.checkpoint(key)
                one.check_rank(rank)
                self._alive(one, rank, now)
                return []
            case TableArrived(key, rank, table):
                return self._table(key, rank, table, now)
            case ChunkArrived(digest, tier):
                return self._arrived(digest, tier, now)
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
                return self._end(self.upload(key), reason, State.ABORTED, now)
            case Removed(key, reason):
                one = self.checkpoint(key)
                return self._end(one, reason, None if one.committed_at is None else State.COMMITTED, now)
            case ReadFrom(key):
                self.checkpoint(key).read_until = now + self.limits.reading_seconds
                return []
            case ChunkHeld(digest):
                return self._held(digest, now)
            case ChunkReleased(digest):
                self.inventory.chunks[digest].readers -= 1
                return self._dropped((digest,))
            case HolderReported():
                return self._holder(event, now)
            case MemoryWanted(size):
                return self._room(size, now)
            case DiskFull():
                return self._drop_unused("the disk is full", now)
            case Tick():
                return self._tick(now)

    def restore(self, key: Key, facts: Facts, tables: dict[int, Table], committed_at: float | None, now: float) -> None:
        """Add a checkpoint from an earlier process. The shell then sends ``ChunkArrived`` for each chunk.

        A commit after ``now``, by a clock that was set back since, counts as one of ``now``: it would never be old.
        """
        one = Checkpoint(key, facts, now)
        self._add(one)
        for rank, table in tables.items():
            self._use(one, rank, table)
        one.committed_at = None if committed_at is None else min(committed_at, now)
        self._replace(key)

    def _add(self, one: Checkpoint) -> None:
        self.checkpoints[one.key] = one
        self._versions.setdefault(one.key.at(0), set()).add(one.key.version)

    def _remove(self, key: Key) -> None:
        del self.checkpoints[key]
        versions = self._versions[key.at(0)]
        versions.discard(key.version)
        if not versions:
            del self._versions[key.at(0)]

    # ---- an upload

    def _begin(self, begun: Begun, now: float) -> list[Decision]:
        key, facts, rank = begun.key, begun.facts, begun.rank
        known = self.checkpoints.get(key)
        if known is not None:
            if known.facts != facts:
                raise RefusedError(
                    Cause.CONFLICT, f"{key} exists already with {known.facts}, not with {facts}: use another id"
                )
            self._rank_begins(known, rank, now)
            return []
        if facts.ranks > self.limits.ranks:
            raise RefusedError(Cause.FULL, f"{key} has {facts.ranks} ranks (limit {self.limits.ranks})")
        one = Checkpoint(key, facts, now)
        self._rank_begins(one, rank, now)
        ended = self.ended.get(key)
        if ended is not None and not begun.again:
            return [TooLate(ended.reason)]
        if ended is not None and rank is not None and ended.absent >> rank & 1:
            self.ended[key] = replace(ended, absent=ended.absent & ~(1 << rank))
            if now < ended.at + self.limits.upload_seconds:
                return [TooLate(ended.reason)]
        is_full = len(self.checkpoints) >= self.limits.checkpoints
        room = self._drop_unused("--max-checkpoints", now) if is_full else []
        if is_full and not room:
            raise RefusedError(
                Cause.FULL,
                f"this relay is full: {self.limits.checkpoints} checkpoints (--max-checkpoints); remove some (keepstep "
                f"checkpoint rm) or keep fewer (--keep-live, --keep-durable, --durable-ttl)",
            )
        self.ended.pop(key, None)
        self._add(one)
        return [*room, Keep(key), Wake((key,))]

    def _rank_begins(self, one: Checkpoint, rank: int | None, now: float) -> None:
        if rank is not None:
            one.check_rank(rank)
            self._alive(one, rank, now)

    def _root(self, report: RootReported, now: float) -> list[Decision]:
        one = self.checkpoint(report.key)
        one.check_rank(report.rank)
        roots = one.roots.setdefault(report.rank, {})
        if report.producer not in roots and len(roots) >= self.limits.producers:
            raise RefusedError(Cause.FULL, f"too many producers for rank {report.rank} (limit {self.limits.producers})")
        roots[report.producer] = report.root
        if one.root(report.rank) == report.root:
            self._alive(one, report.rank, now)
        return []

    def _layout(self, key: Key, rank: int, digest: bytes, now: float) -> list[Decision]:
        one = self.upload(key)
        one.check_rank(rank)
        if one.layouts.setdefault(rank, digest) != digest:
            raise RefusedError(
                Cause.CONFLICT,
                f"rank {rank} of {key} has another layout already, of a process that ended or of another state; abort "
                f"the upload, wait until it expires (--upload-timeout), or use another id",
            )
        self._alive(one, rank, now)
        return [Wake((key,))] if len(one.layouts) == one.facts.ranks else []

    def _table(self, key: Key, rank: int, table: Table, now: float) -> list[Decision]:
        one = self.checkpoint(key)
        one.check_rank(rank)
        counts = one.root(rank)
        if counts is not None and counts != table.root:
            raise RefusedError(
                Cause.CONFLICT,
                f"rank {rank} of {key} has root {counts.hex()}, this manifest has {table.root.hex()}: another state",
            )
        if rank in one.tables:
            self._alive(one, rank, now)
            return []
        self.upload(key)
        new = self.inventory.unknown(rank, table)
        if len(self.inventory.chunks) + len(new) > self.limits.chunks:
            raise RefusedError(
                Cause.FULL,
                f"{key} needs {len(new)} more chunks, and this relay has {len(self.inventory.chunks)} (limit "
                f"{self.limits.chunks}, --max-chunks)",
            )
        self._use(one, rank, table)
        self._alive(one, rank, now)
        return [Wake((key, *new))]

    def _use(self, one: Checkpoint, rank: int, table: Table) -> None:
        one.tables[rank] = table
        one.missing[rank] = self.inventory.add_user(one.key, rank, table)

    def _alive(self, one: Checkpoint, rank: int, now: float) -> None:
        if one.committed_at is None and rank not in one.reported:
            one.heard[rank] = now

    def _arrived(self, digest: bytes, tier: Tier, now: float) -> list[Decision]:
        chunk = self.inventory.chunks.get(digest)
        if chunk is None:
            return [Drop((digest,))]
        if not self.inventory.add(digest, tier):
            return []
        for key, rank in chunk.users:
            one = self.checkpoints[key]
            one.missing[rank] -= 1
            one.arrived = True
            one.came_bytes += chunk.length
            one.came_at = now
            one.throughput.count(one.came_bytes, now)
            self._alive(one, rank, now)
        return [Wake((digest,))]

    def _copied(self, key: Key, now: float) -> list[Decision]:
        one = self.checkpoint(key)
        one.copied = True
        decisions: list[Decision] = []
        for digest in one.digests():
            decisions += self._arrived(digest, Tier.DURABLE, now)
        return decisions

    def _lost(self, digest: bytes, tier: Tier, now: float) -> list[Decision]:
        if self.inventory.remove(digest, tier):
            for key, rank in self.inventory.chunks[digest].users:
                one = self.checkpoints[key]
                one.missing[rank] += 1
                self._wait_again(one, rank, now)
        return []

    def _wait_again(self, one: Checkpoint, rank: int, now: float) -> None:
        """Wait for the rank's report again: it is no longer true."""
        one.reported.discard(rank)
        if one.committed_at is None:
            one.heard.setdefault(rank, now)

    def _report(self, report: RankReported, now: float) -> list[Decision]:
        key, rank = report.key, report.rank
        if report.error is not None:
            one = self.upload(key)
            one.check_rank(rank)
            came = {*one.heard, *one.reported, rank}
            absent = sum(1 << each for each in range(one.facts.ranks) if each not in came)
            return self._end(one, f"rank {rank} failed: {report.error}", State.ABORTED, now, absent=absent)
        one = self.checkpoint(key)
        one.check_rank(rank)
        if one.committed_at is not None:
            return []
        self._alive(one, rank, now)
        if rank not in one.tables:
            raise RefusedError(Cause.CONFLICT, f"missing manifest: rank {rank} of {key}")
        if one.missing[rank] and not report.part:
            raise RefusedError(Cause.CONFLICT, f"{one.missing[rank]} missing chunks: rank {rank} of {key}")
        if report.part and one.facts.kind is not Kind.LIVE:
            raise RefusedError(Cause.CONFLICT, f"{key} is durable: all of its chunks must be at one relay")
        if one.facts.stays_open:
            return []
        was_part = one.is_part
        one.part |= report.part
        one.reported.add(rank)
        one.heard.pop(rank, None)
        if len(one.reported) == one.facts.ranks and one.complete:
            return self._commit(key)
        if len(one.reported) == one.facts.ranks and not one.part:  # the states of the ranks do not fit together yet
            for each in range(one.facts.ranks):
                self._wait_again(one, each, now)
        if one.is_part:
            one.read_until = max(one.read_until, now + self.limits.reading_seconds)
        return [one.ended(self.missing_bytes(one))] if one.is_part and not was_part else []

    def _commit(self, key: Key) -> list[Decision]:
        one = self.checkpoint(key)
        if one.committed_at is not None or one.sealing:
            return []
        if (reason := one.why_incomplete()) is not None:
            raise RefusedError(Cause.CONFLICT, reason)
        one.sealing = True
        return [Seal(key, tuple(one.digests()))]

    def _sealed(self, key: Key, now: float) -> list[Decision]:
        one = self.upload(key)
        one.sealing, one.committed_at = False, now
        one.heard.clear()
        self._replace(key)
        return [one.ended(0), Wake((key,)), *self._retire(now, fresh=one), *self._make_reusable(one, now)]

    def _make_reusable(self, fresh: Checkpoint, now: float) -> list[Decision]:
        """Evict the chunks of earlier durable checkpoints of a job that the disk has: the next save needs the memory.

        Fresh memory costs more processor time than to receive, verify and write the bytes. Live states stay in memory:
        joiners may be reading them.
        """
        if fresh.facts.kind is not Kind.DURABLE or fresh.key not in self.checkpoints:
            return []
        chunks, kept = self.inventory.chunks, set(fresh.digests())
        chosen = []
        for one in self.checkpoints.values():
            if one.key.job != fresh.key.job or one.facts.kind is not Kind.DURABLE or one.committed_at is None:
                continue
            for digest in one.digests():
                chunk = chunks[digest]
                if digest not in kept and not chunk.readers and {Tier.MEMORY, Tier.DISK} <= chunk.tiers:
                    self._lost(digest, Tier.MEMORY, now)
                    chosen.append(digest)
        return [Evict(tuple(chosen))] if chosen else []

    def _replace(self, key: Key) -> None:
        """Let the last committed version of a checkpoint replace those before it."""
        current = self.current(key).version
        for one in self.versions(key):
            one.replaced = one.key.version < current

    def _seal_failed(self, key: Key, now: float) -> list[Decision]:
        one = self.upload(key)
        one.sealing = False
        for rank in range(one.facts.ranks):
            self._wait_again(one, rank, now)
        return [Wake((key,))]

    # ---- ends

    def _end(
        self,
        one: Checkpoint,
        reason: str,
        state: State | None,
        now: float,
        *,
        is_fault: bool = True,
        absent: int = 0,
    ) -> list[Decision]:
        if one.sealing:
            raise RefusedError(Cause.CONFLICT, f"{one.key} is being committed; ask again")
        reported = one.committed_at is not None or one.is_part
        ended = [] if reported else [one.ended(self.missing_bytes(one), reason if is_fault else "")]
        before: list[Decision] = []
        if self.current(one.key) == one.key:
            for version in self.versions(one.key):
                if version.replaced:  # it must not come back
                    before += self._end(version, OVERWRITTEN, State.COMMITTED, now)
        self._remove(one.key)
        self.ended[one.key] = Ended(reason, state, absent, now)
        while len(self.ended) > MAX_ENDED:
            self.ended.popitem(last=False)
        for rank, table in one.tables.items():
            self.inventory.remove_user(one.key, rank, table)
        chunks = self.inventory.chunks
        if one.copied:
            for digest in one.digests():
                if not any(self.checkpoints[key].copied for key, _ in chunks[digest].users):
                    self._lost(digest, Tier.DURABLE, now)  # deleted with its copy
        unused = [digest for digest in one.digests() if not chunks[digest].users]
        return [*before, *ended, Forget(one.key, reason), *self._dropped(unused), Wake((one.key, *unused))]

    def _dropped(self, digests: Iterable[bytes]) -> list[Decision]:
        dropped = self.inventory.drop_unused(digests)
        return [Drop(dropped)] if dropped else []

    def _retire(self, now: float, fresh: Checkpoint | None = None) -> list[Decision]:
        """Drop what is beyond count and age. ``fresh``: committed just now; if it is dropped, it was never kept.

        With ``fresh`` only its job is looked at: a ``Tick`` follows for the others.
        """
        decisions: list[Decision] = []
        known = [one for one in self.checkpoints.values() if fresh is None or one.key.job == fresh.key.job]
        for due in list(retirements(known, self.limits)):
            if due.at <= now and due.checkpoint.key in self.checkpoints:
                state = None if due.checkpoint is fresh else State.COMMITTED
                decisions += self._end(due.checkpoint, due.reason, state, now)
        return decisions

    def _drop_unused(self, why: str, now: float) -> list[Decision]:
        one = longest_unused(self.checkpoints.values(), self.limits, now)
        if one is None:
            return []
        reason = f"room for newer checkpoints ({why}): a live state unused for {now - used_until(one):.0f} s"
        return self._end(one, reason, State.COMMITTED, now)

    def _tick(self, now: float) -> list[Decision]:
        for one in self.checkpoints.values():
            one.holders = {name: holder for name, holder in one.holders.items() if holder.until > now}
        decisions: list[Decision] = []
        for end in list(expired(self.checkpoints.values(), self.limits, now)):
            decisions += self._end(end.checkpoint, end.reason, end.state, now, is_fault=end.is_fault)
        return decisions + self._retire(now)

    # ---- readers

    def _held(self, digest: bytes, now: float) -> list[Decision]:
        chunk = self.inventory.chunks.get(digest)
        if chunk is None:
            raise RefusedError(Cause.UNKNOWN, f"chunk {digest.hex()} not found: no checkpoint of this relay names it")
        chunk.readers += 1
        if digest in self.inventory.memory:
            self.inventory.memory.move_to_end(digest)
        for key, _ in chunk.users:
            self.checkpoints[key].read_until = now + self.limits.reading_seconds
        return []

    def _holder(self, report: HolderReported, now: float) -> list[Decision]:
        one = self.checkpoint(report.key)
        one.check_rank(report.rank)
        table = one.tables.get(report.rank)
        if table is None or len(report.bitmap) != -(-len(table.digests) // 8):
            chunks = "no manifest" if table is None else f"{len(table.digests)} chunks"
            raise RefusedError(
                Cause.CONFLICT, f"invalid bitmap of {len(report.bitmap)} bytes: rank {report.rank} has {chunks}"
            )
        if (report.rank, report.name) not in one.holders and len(one.holders) >= self.limits.holders:
            raise RefusedError(Cause.FULL, f"{one.key} has too many holders (limit {self.limits.holders})")
        one.holders[report.rank, report.name] = Holder(report.address, report.bitmap, now + self.limits.holder_seconds)
        one.read_until = now + self.limits.reading_seconds
        return []

    def _room(self, size: int, now: float) -> list[Decision]:
        chosen = evictions(self.inventory.memory, self.inventory.chunks, self.checkpoints, size, now)
        for digest in chosen:
            size -= self.inventory.chunks[digest].length
            self._lost(digest, Tier.MEMORY, now)
        decisions: list[Decision] = [Evict(tuple(chosen))] if chosen else []
        for due in list(retirements(self.checkpoints.values(), self.limits)):
            one, held = due.checkpoint, self.inventory.tier_bytes[Tier.MEMORY]
            if one.key not in self.checkpoints:
                continue
            if size > 0 and due.spare and not any(self.inventory.chunks[digest].readers for digest in one.digests()):
                decisions += self._end(one, f"{due.reason}; memory ran short", State.COMMITTED, now)
                size -= held - self.inventory.tier_bytes[Tier.MEMORY]
        return decisions
