"""Reading bytes of packs. Every byte is verified, and large ranges are received straight into their memory.

A read is planned by chunks: each part of a chunk that has a wanted byte is read once, in the order of the packs, on
several threads. A part (``Parts``) that lies in the memory of one ``Wanted`` goes there directly. Other parts pass
through a buffer of their size, which the cache of the processor holds.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np

from keepstep.state.errors import CheckpointDamaged
from keepstep_mesh.protocol.manifest import CHUNK_BYTES, Envelope, chunk_digest
from keepstep_mesh.threads.starting import ThreadPoolExecutor

STREAMS = 4
"""Chunks that one load reads at a time."""
RECENT_PARTS = 16
"""Parts that are kept for the next small read."""

Fill: TypeAlias = Callable[[memoryview], None]
"""Fills the memory with the next bytes."""


class Wanted:
    """Bytes of a pack, and the memory that receives them.

    Args:
        key: names them in errors. Empty: the caller does.
        rank: the pack.
        offset: first byte.
        nbytes: their number, at least 1.
        memory: receives them. None: memory that is allocated when the first byte arrives.
        then: called with the memory when all bytes are there and verified, on the thread that read the last ones.
    """

    def __init__(
        self,
        key: str,
        rank: int,
        offset: int,
        nbytes: int,
        memory: memoryview | None = None,
        then: Callable[[memoryview], None] | None = None,
    ) -> None:
        self.key = key
        self.rank = rank
        self.offset = offset
        self.nbytes = nbytes
        self._memory = memory
        self._then = then
        self._left = nbytes
        self._lock = threading.Lock()

    def view(self, start: int, stop: int) -> memoryview:
        """Return the memory of a range of the pack."""
        with self._lock:
            if self._memory is None:
                self._memory = _new_memory(self.nbytes)
            return self._memory[start - self.offset : stop - self.offset]

    def arrived(self, nbytes: int) -> None:
        """Count bytes that are in the memory, and verified. Each byte is counted once."""
        with self._lock:
            self._left -= nbytes
            memory = self._memory
            if self._left or memory is None:
                return
            self._memory = None
        if self._then is not None:
            self._then(memory)


@dataclass(frozen=True)
class StoredManifest:
    """The manifest of one rank."""

    data: bytes
    envelope: Envelope


class PackSource(Protocol):
    """The packs of a checkpoint at one place, not verified. Safe to use from several threads."""

    def manifests(self) -> list[StoredManifest]:
        """Return the manifest of each rank, in order. Raises as ``CheckpointReader`` does."""

    def fetch(self, rank: int, offset: int, length: int, receive: Callable[[Fill], None]) -> None:
        """Call ``receive`` with a function that fills memory with the next of these bytes, which lie in one chunk.

        It is called again if the connection breaks.

        Raises:
            CheckpointDamaged: the place does not have the bytes.
        """

    def name(self, rank: int) -> str:
        """Return the pack of a rank, for errors."""

    def close(self) -> None:
        """Release connections and files."""


@dataclass
class _ChunkRead:
    """The wanted bytes of one chunk, by the number of the part that has them."""

    rank: int
    chunk: int
    wanted: list[Wanted] = field(default_factory=list)

    def range_of(self, one: Wanted) -> tuple[int, int]:
        """Return the range of the pack that ``one`` has in this chunk."""
        start = self.chunk * CHUNK_BYTES
        return max(one.offset, start), min(one.offset + one.nbytes, start + CHUNK_BYTES)

    def by_part(self, size: int) -> dict[int, list[Wanted]]:
        found: defaultdict[int, list[Wanted]] = defaultdict(list)
        for one in self.wanted:
            start, stop = self.range_of(one)
            for part in range(start // size, -(-stop // size)):
                found[part].append(one)
        return found


def _chunk_reads(wanted: Iterable[Wanted]) -> list[_ChunkRead]:
    """Return the chunks to read, in the order of the packs."""
    found: dict[tuple[int, int], _ChunkRead] = {}
    for one in wanted:
        for chunk in range(one.offset // CHUNK_BYTES, -(-(one.offset + one.nbytes) // CHUNK_BYTES)):
            found.setdefault((one.rank, chunk), _ChunkRead(one.rank, chunk)).wanted.append(one)
    return [found[place] for place in sorted(found)]


def _runs(numbers: Iterable[int]) -> Iterator[range]:
    """Yield the runs of consecutive numbers."""
    run = range(0)
    for number in sorted(numbers):
        if run and number == run.stop:
            run = range(run.start, number + 1)
        else:
            if run:
                yield run
            run = range(number, number + 1)
    if run:
        yield run


class VerifiedReader:
    """Reads a committed checkpoint, and verifies every byte. See ``CheckpointReader``.

    Args:
        source: the packs.
    """

    def __init__(self, source: PackSource) -> None:
        self._source = source
        self._envelopes: list[Envelope] = []
        self._recent: OrderedDict[tuple[int, int], memoryview] = OrderedDict()
        """The parts that small reads have read last, by rank and number."""
        self._lock = threading.Lock()

    def manifests(self) -> list[bytes]:
        """See ``CheckpointReader``."""
        found = self._source.manifests()
        self._envelopes = [one.envelope for one in found]
        return [one.data for one in found]

    def read(self, rank: int, offset: int, length: int, into: memoryview | None = None) -> memoryview:
        """See ``CheckpointReader``."""
        memory = _new_memory(length) if into is None else into
        if length:
            for one in _chunk_reads([Wanted("", rank, offset, length, memory)]):
                self._read_chunk(one, keep=True)
        return memory

    def read_all(self, wanted: Sequence[Wanted]) -> None:
        """See ``CheckpointReader``."""
        reads = _chunk_reads(wanted)
        if len(reads) <= 1:
            for one in reads:
                self._read_chunk(one)
            return
        with ThreadPoolExecutor(min(STREAMS, len(reads)), "keepstep-load") as pool:
            running = [pool.submit(self._read_chunk, one) for one in reads]
            try:
                for read in running:
                    read.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def close(self) -> None:
        """See ``CheckpointReader``."""
        self._recent.clear()
        self._source.close()

    def _read_chunk(self, read: _ChunkRead, *, keep: bool = False) -> None:
        """Read the wanted bytes of a chunk. ``keep``: also for the next small read."""
        by_part = read.by_part(self._envelopes[read.rank].parts.size)
        if keep:
            self._take_recent(read, by_part)
        for run in _runs(by_part):
            self._read_run(read, run, by_part, keep)
        for one in read.wanted:
            start, stop = read.range_of(one)
            one.arrived(stop - start)

    def _read_run(self, read: _ChunkRead, run: range, by_part: dict[int, list[Wanted]], keep: bool) -> None:
        envelope, key = self._envelopes[read.rank], by_part[run.start][0].key
        parts, scratch = envelope.parts, memoryview(b"")

        def range_of(part: int) -> tuple[int, int]:
            return part * parts.size, min((part + 1) * parts.size, envelope.pack_bytes)

        def receive(fill: Fill) -> None:
            nonlocal key, scratch
            for part in run:
                (start, stop), into = range_of(part), by_part[part]
                direct = next((one for one in into if one.offset <= start and stop <= one.offset + one.nbytes), None)
                if direct is None and (keep or not scratch):
                    scratch = _new_memory(parts.size)
                data = scratch[: stop - start] if direct is None else direct.view(start, stop)
                key = into[0].key
                fill(data)
                if chunk_digest(data) != parts.digest(part):
                    raise CheckpointDamaged(f"chunk {read.chunk} of {self._source.name(read.rank)} is damaged")
                for one in into:
                    if one is not direct:
                        _copy(data, start, one)
                if direct is None and keep:
                    self._keep(read.rank, part, data)

        first, end = range_of(run.start)[0], range_of(run.stop - 1)[1]
        try:
            self._source.fetch(read.rank, first, end - first, receive)
        except CheckpointDamaged as error:
            if not key:
                raise
            raise CheckpointDamaged(f"{key} was not loaded: {error}") from error

    def _take_recent(self, read: _ChunkRead, by_part: dict[int, list[Wanted]]) -> None:
        """Copy the bytes of parts that were read recently, and remove them from ``by_part``."""
        size = self._envelopes[read.rank].parts.size
        for part in list(by_part):
            with self._lock:
                data = self._recent.get((read.rank, part))
            if data is not None:
                for one in by_part.pop(part):
                    _copy(data, part * size, one)

    def _keep(self, rank: int, part: int, data: memoryview) -> None:
        with self._lock:
            self._recent[rank, part] = data
            while len(self._recent) > RECENT_PARTS:
                self._recent.popitem(last=False)


def _copy(data: memoryview, at: int, to: Wanted) -> None:
    """Copy what ``to`` wants of ``data``, which lies at byte ``at`` of the pack."""
    start, stop = max(at, to.offset), min(at + data.nbytes, to.offset + to.nbytes)
    to.view(start, stop)[:] = data[start - at : stop - at]


def _new_memory(nbytes: int) -> memoryview:
    memory: memoryview = np.empty(nbytes, np.uint8).data
    return memory
