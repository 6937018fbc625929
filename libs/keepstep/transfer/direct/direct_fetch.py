"""The receiving half of ``HTTPTransport``: blocking sockets that receive directly into the destination tensors.

Each stream is one connection in one thread. It requests runs of chunks, receives them in pieces that fit the cache of
the processor, and hashes each piece while it is cached. The digests arrive last, so that source and joiner hash at the
same time; a chunk whose digest differs is fetched again. ``MSG_WAITALL`` with the timeout of the kernel receives a
piece in one system call without the GIL. After a broken connection, the transfer continues with the first missing
chunk.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Iterable, Iterator

from keepstep.connection.http_connection import BrokenConnection, Connection
from keepstep.state.errors import TransferError
from keepstep.transfer.receiving import ChunkReceiver
from keepstep.transfer.state_transfer import Transfer
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.protocol.manifest import CHUNK_BYTES, chunk_count, chunk_length
from keepstep_mesh.threads.starting import ThreadPoolExecutor

MAX_STREAMS = 32
MAX_DAMAGES = 3
"""A transfer fails when one chunk arrives damaged this many times."""
MAX_RUN_CHUNKS = 16
"""Chunks in one request, if a transfer has several streams."""

log = get_logger("keepstep.transfer")


class DirectChunks:
    """Receives the chunks of ``transfer`` from its source over ``streams`` connections, 1 to ``MAX_STREAMS``."""

    needs_digests = False

    def __init__(self, transfer: Transfer, streams: int) -> None:
        self._transfer = transfer
        self._streams = max(1, min(streams, MAX_STREAMS))
        self._lock = threading.Lock()
        self._runs: deque[range] = deque()
        self._unverified: dict[int, bytes] = {}
        """Digests of the chunks received before the manifest."""
        self._damages: Counter[int] = Counter()

    def source_lost(self, reason: str) -> None:
        """Abort: no other process has the state."""
        self._transfer.abort(reason)

    def wake(self) -> None:
        """See ``ChunkSource``. Every wait here is on a connection."""

    def receive_chunks(self) -> None:
        """See ``ChunkSource``."""
        transfer = self._transfer
        chunks = chunk_count(transfer.destination.pack_bytes)
        length = chunks if self._streams == 1 else max(1, min(MAX_RUN_CHUNKS, chunks // (4 * self._streams)))
        if transfer.manifest is not None:
            here = transfer.chunks_here(transfer.manifest.chunk_digests)
            self._receive_runs(_runs(chunks, here, length))
            return
        self._receive_runs(_runs(chunks, 0, length))
        transfer.retry(transfer.receive_digests)
        self._receive_runs(range(chunk, chunk + 1) for chunk in self._damaged())

    def _damaged(self) -> list[int]:
        """Return the chunks received before the manifest whose digests differ from it."""
        transfer = self._transfer
        assert transfer.manifest is not None
        digests = transfer.manifest.chunk_digests
        damaged = [chunk for chunk, digest in enumerate(digests) if self._unverified[chunk] != digest]
        for chunk in damaged:
            transfer.bytes_done -= chunk_length(transfer.destination.pack_bytes, chunk)
            self._count_damage(chunk, transfer.source.address)
        return damaged

    def _receive_runs(self, runs: Iterable[range]) -> None:
        self._runs = deque(runs)
        streams = min(self._streams, len(self._runs))
        if streams <= 1:
            if self._runs:
                self._receive_stream()
            return
        with ThreadPoolExecutor(streams, "keepstep-receive") as pool:
            for stream in [pool.submit(self._receive_stream) for _ in range(streams)]:
                stream.result()

    def _receive_stream(self) -> None:
        todo: deque[int] = deque()
        receiver = ChunkReceiver(self._transfer.destination)

        def work(connection: Connection) -> None:
            while todo or self._take_run(todo):
                self._receive_run(connection, todo, receiver)

        try:
            self._transfer.retry(work)
        except BaseException as error:
            self._transfer.end(error)
            raise

    def _take_run(self, todo: deque[int]) -> bool:
        with self._lock:
            if self._runs:
                todo.extend(self._runs.popleft())
        return bool(todo)

    def _receive_run(self, connection: Connection, todo: deque[int], receiver: ChunkReceiver) -> None:
        """Receive the consecutive chunks of ``todo``, and remove each one when it is verified."""
        transfer = self._transfer
        first = todo[0] * CHUNK_BYTES
        last = min((todo[-1] + 1) * CHUNK_BYTES, transfer.destination.pack_bytes) - 1
        line = f"Range: bytes={first}-{last}\r\n"
        _, length = connection.ask("GET", f"/lease/{transfer.lease}", line, queued=lambda: None)
        if length != last + 1 - first:
            raise TransferError(f"wrong length of a range: asked for {last + 1 - first} bytes, got {length}")
        while todo:
            self._receive_chunk(connection, todo[0], receiver)
            todo.popleft()

    def _receive_chunk(self, connection: Connection, chunk: int, receiver: ChunkReceiver) -> None:
        digest, size = receiver.receive(connection, chunk)
        manifest = self._transfer.manifest
        if manifest is None:
            self._unverified[chunk] = digest
        elif digest != manifest.chunk_digests[chunk]:
            self._count_damage(chunk, connection.address)
            raise BrokenConnection(f"chunk {chunk} arrived damaged")
        self._transfer.count(size)

    def _count_damage(self, chunk: int, sender: str) -> None:
        step = self._transfer.step
        self._damages[chunk] += 1
        log.warning("chunk arrived damaged", step=step, chunk=chunk, sender=sender, times=self._damages[chunk])
        if self._damages[chunk] == MAX_DAMAGES:
            raise TransferError(f"chunk {chunk} of step {step} arrived damaged {MAX_DAMAGES} times")


def _runs(chunks: int, here: int, length: int) -> Iterator[range]:
    """Yield the chunks that are not ``here`` (bits), as runs of at most ``length`` consecutive chunks."""
    first = 0
    while first < chunks:
        last = first
        while last < min(chunks, first + length) and not here >> last & 1:
            last += 1
        if last > first:
            yield range(first, last)
        first = max(last, first + 1)
