"""The receiving half of ``HTTPTransport``: blocking sockets, from the kernel straight into the destination tensors.

Each stream is one connection in one thread that asks for runs of chunks, receives them in pieces that fit the
processor's cache and hashes a piece while it is there. The digests come last, so that source and joiner hash at the
same time; a chunk that has another is fetched again, and checked as it comes. ``MSG_WAITALL`` with the socket's own
timeout makes a piece one system call without the GIL. What breaks is asked for again from the last chunk that came.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

from keepstep.checkpointing.direct.connection import BrokenConnection, Connection, Deadline, Endpoint
from keepstep.checkpointing.direct.receiving import ChunkReceiver, digest_of
from keepstep.checkpointing.errors import TransferError
from keepstep.checkpointing.state.restoring import Destination, Spare
from keepstep.checkpointing.state.state_manifest import Manifest, read_content, read_manifest
from keepstep.checkpointing.transport import Progress
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import ManifestError
from keepstep_mesh.net.backoff import Backoff
from keepstep_mesh.protocol.manifest import CHUNK_BYTES, MAX_MANIFEST_BYTES, chunk_count, chunk_length
from keepstep_mesh.security.tokens import ClientToken

MAX_STREAMS = 32
STALL_SECONDS = 10.0
"""A connection on which nothing came for this long is given up and made anew."""
MAX_FAILURES = 5
"""Broken connections in a row, without a chunk between them, after which the source counts as lost."""
MAX_DAMAGES = 3
"""Times that one chunk may arrive damaged."""
RETRY_BACKOFF = Backoff(first=0.05, most=1.0)
GIVE_BACK_SECONDS = 1.0
MAX_RUN_CHUNKS = 16
"""Chunks that one of several streams asks for at a time."""
WAIT_SHARE = 0.9
"""Share of the time left that the source may wait for the step, so that its reason arrives before the deadline."""

log = get_logger("keepstep.checkpointing")


class Fetch:
    """One state, from one source. ``run`` it once; ``abort`` it from any thread.

    Args:
        timeout: for all of it; with ``limit``: without progress, which a byte of the state is, and a word of the source
            that this reader waits for its turn there.
        limit: for all of it.
        spare: what an attempt that failed left behind, in memory of its own; chunks that are right already, there or in
            the tensors of ``into``, are not fetched again. None: there was no such attempt.
    """

    def __init__(
        self,
        base_url: str,
        step: int,
        timeout: float,
        *,
        token: ClientToken,
        streams: int,
        progress: Progress | None,
        limit: float | None = None,
        spare: Spare | None = None,
    ) -> None:
        self._source = Endpoint.of(base_url, token.peer_headers)
        self._step = step
        self._streams = max(1, min(streams, MAX_STREAMS))
        self._progress = progress
        self._deadline = Deadline(timeout, f"step {step} from {base_url} was not received", limit)
        self._spare, self._had_spare = spare, spare is not None
        self._lock = threading.Lock()
        self._open: set[Connection] = set()
        self._ended: BaseException | None = None
        self._wake = threading.Event()
        self._torn = False
        self._has_begun = False
        self._manifest: Manifest | None = None
        self._unverified: dict[int, bytes] = {}
        """Digests of the chunks that came before their digests were known."""
        self._damages: Counter[int] = Counter()
        self._bytes_done = 0

    def run(self, into: Any = None) -> Any:
        """The state. Raises ``TransferError``, ``TransferTimeout`` or ``ManifestError``."""
        try:
            self._retry(self._begin)
            self._has_begun = True
            try:
                self._destination = Destination(self._content, into, self._spare)
                self._spare = self._destination.fresh
                self._torn = self._destination.in_place_bytes > 0
                self._receive_chunks()
            finally:
                self._give_back_lease()
            return self._destination.result()
        except TransferError as error:
            error.torn = self._torn
            raise

    @property
    def spare(self) -> Spare | None:
        """For the next attempt, when this one has failed; None: nothing was received by any."""
        return self._spare

    def abort(self, reason: str) -> None:
        """Makes ``run`` raise ``TransferError`` at once."""
        self._end(TransferError(f"receiving step {self._step} was aborted: {reason}"))

    def source_lost(self, reason: str) -> None:
        """There is no other one."""
        self.abort(reason)

    def _end(self, error: BaseException) -> None:
        with self._lock:
            self._ended = self._ended or error
            self._wake.set()
            for connection in self._open:
                connection.interrupt()

    def _retry(self, work: Callable[[Connection], None]) -> None:
        """Runs ``work`` to its end, again on a new connection each time that one breaks."""
        failures, bytes_done = 0, self._bytes_done
        while True:
            try:
                with self._connect(self._source) as connection:
                    return work(connection)
            except BrokenConnection as error:
                if self._ended is not None:
                    raise self._ended from error
                failures = failures + 1 if self._bytes_done == bytes_done else 1
                bytes_done = self._bytes_done
                if failures == MAX_FAILURES:
                    raise TransferError(f"the source of step {self._step} is lost: {error}") from error
                log.info("transfer broken, going on", step=self._step, reason=str(error), failures=failures)
                self._wake.wait(min(RETRY_BACKOFF.seconds(failures), self._deadline.remaining()))

    @contextlib.contextmanager
    def _connect(self, to: Endpoint, patience: float = STALL_SECONDS) -> Iterator[Connection]:
        connection = self._opened(to, patience)
        try:
            yield connection
        finally:
            self._close(connection)

    def _opened(self, to: Endpoint, patience: float) -> Connection:
        """A connection that ``abort`` interrupts, until ``_close``."""
        connection = Connection(to, self._deadline, patience)
        with self._lock:
            ended = self._ended
            self._open.add(connection)
        try:
            if ended is not None:
                raise ended
            connection.connect()
        except BaseException:
            self._close(connection)
            raise
        return connection

    def _close(self, connection: Connection) -> None:
        with self._lock:
            self._open.discard(connection)
            connection.close()

    def _begin(self, connection: Connection) -> None:
        """Chunks may come before the source has hashed them: that takes as long as they take to come."""
        if self._spare is not None:
            self._begin_with_manifest(connection)
            return
        self._content_bytes = self._receive_head(connection, "content")
        self._content = read_content(self._content_bytes)

    def _begin_with_manifest(self, connection: Connection) -> None:
        self._manifest = self._read_manifest(self._receive_head(connection, "checkpoint"))
        self._content = self._manifest.content

    def _receive_head(self, connection: Connection, kind: str) -> bytes:
        """With the lease that comes with it."""
        remaining = self._deadline.remaining()
        wait = remaining * WAIT_SHARE
        fields, length = connection.ask("GET", f"/{kind}/{self._step}?wait={wait:.3f}", patience=remaining)
        self._lease = fields.get("keepstep-lease", "")
        return self._read_short(connection, length)

    def _read_short(self, connection: Connection, length: int) -> bytes:
        if length > MAX_MANIFEST_BYTES:
            raise ManifestError(f"manifest of {length} bytes; at most {MAX_MANIFEST_BYTES} are taken")
        return bytes(connection.read(length))

    def _read_manifest(self, data: bytes) -> Manifest:
        manifest = read_manifest(data)
        if manifest.origin.step != self._step:
            raise ManifestError(f"asked for step {self._step}, got step {manifest.origin.step}")
        return manifest

    def _receive_digests(self, connection: Connection) -> None:
        remaining = self._deadline.remaining()
        _, length = connection.ask("GET", f"/manifest/{self._lease}", patience=remaining)
        manifest = self._read_manifest(self._read_short(connection, length))
        if manifest.content_bytes != self._content_bytes:
            raise TransferError(f"what the chunks of step {self._step} mean arrived damaged")
        self._manifest = manifest

    def _give_back_lease(self) -> None:
        """So that the source can reuse the memory at once, not only when the lease runs out."""
        try:
            with self._connect(self._source, GIVE_BACK_SECONDS) as connection:
                connection.ask("DELETE", f"/lease/{self._lease}")
        except (BrokenConnection, TransferError) as error:
            log.info("could not give the lease back, it will run out", step=self._step, reason=str(error))

    def _receive_chunks(self) -> None:
        chunks = chunk_count(self._destination.pack_bytes)
        length = chunks if self._streams == 1 else max(1, min(MAX_RUN_CHUNKS, chunks // (4 * self._streams)))
        known = self._manifest
        if known is not None:
            self._receive_runs(_runs(chunks, self._chunks_here(known.chunk_digests), length))
            return
        self._receive_runs(_runs(chunks, 0, length))
        self._retry(self._receive_digests)
        assert self._manifest is not None
        again = [
            chunk for chunk, digest in enumerate(self._manifest.chunk_digests) if self._unverified[chunk] != digest
        ]
        for chunk in again:
            self._bytes_done -= chunk_length(self._destination.pack_bytes, chunk)
            self._count_damage(chunk, self._source.address)
        if again:
            self._receive_runs(range(chunk, chunk + 1) for chunk in again)

    def _chunks_here(self, digests: Sequence[bytes]) -> int:
        """Those that an attempt that failed has left where they belong, as bits; they count as received."""
        here = 0
        for chunk, digest in enumerate(digests) if self._had_spare else ():
            if digest_of(self._destination.segments(chunk)) == digest:
                here |= 1 << chunk
                self._count(chunk_length(self._destination.pack_bytes, chunk))
        if here:
            kept = here.bit_count()
            log.info("chunks of the attempt before are right", step=self._step, chunks=kept, of=len(digests))
        return here

    def _receive_runs(self, runs: Iterable[range]) -> None:
        self._runs = deque(runs)
        streams = min(self._streams, len(self._runs))
        if streams <= 1:
            self._receive_stream()
            return
        with ThreadPoolExecutor(streams, "keepstep-receive") as pool:
            for stream in [pool.submit(self._receive_stream) for _ in range(streams)]:
                stream.result()

    def _receive_stream(self) -> None:
        todo: deque[int] = deque()
        receiver = ChunkReceiver(self._destination)

        def work(connection: Connection) -> None:
            while todo or self._take_run(todo):
                self._receive_run(connection, todo, receiver)

        try:
            self._retry(work)
        except BaseException as error:
            self._end(error)
            raise

    def _take_run(self, todo: deque[int]) -> bool:
        with self._lock:
            if self._runs:
                todo.extend(self._runs.popleft())
        return bool(todo)

    def _receive_run(self, connection: Connection, todo: deque[int], receiver: ChunkReceiver) -> None:
        """Receives the chunks of ``todo``, which follow each other, and takes each out when it is verified."""
        first = todo[0] * CHUNK_BYTES
        last = min((todo[-1] + 1) * CHUNK_BYTES, self._destination.pack_bytes) - 1
        _, length = connection.ask(
            "GET", f"/lease/{self._lease}", f"Range: bytes={first}-{last}\r\n", queued=lambda: None
        )
        if length != last + 1 - first:
            raise TransferError(f"the source sends {length} bytes where {last + 1 - first} were asked for")
        while todo:
            self._receive_chunk(connection, todo[0], receiver)
            todo.popleft()

    def _receive_chunk(self, connection: Connection, chunk: int, receiver: ChunkReceiver) -> None:
        """Takes the body of an answer as ``chunk``. Raises ``BrokenConnection`` when it is known not to be that."""
        digest, size = receiver.receive(connection, chunk)
        if self._manifest is None:
            self._unverified[chunk] = digest
        elif digest != self._manifest.chunk_digests[chunk]:
            self._note_damage(connection, chunk)
        self._count(size)

    def _count(self, size: int) -> None:
        with self._lock:
            self._bytes_done += size
            if self._progress is not None:
                self._progress(self._bytes_done, self._destination.pack_bytes)

    def _note_damage(self, connection: Connection, chunk: int) -> NoReturn:
        self._count_damage(chunk, connection.address)
        raise BrokenConnection(f"chunk {chunk} arrived damaged")

    def _count_damage(self, chunk: int, sender: str) -> None:
        self._damages[chunk] += 1
        times = self._damages[chunk]
        log.warning("chunk arrived damaged", step=self._step, chunk=chunk, sender=sender, times=times)
        if self._damages[chunk] == MAX_DAMAGES:
            raise TransferError(f"chunk {chunk} of step {self._step} arrived damaged {MAX_DAMAGES} times")


def _runs(chunks: int, here: int, length: int) -> Iterator[range]:
    """The chunks that are not ``here`` (bits) in runs of at most ``length`` that follow each other."""
    first = 0
    while first < chunks:
        last = first
        while last < min(chunks, first + length) and not here >> last & 1:
            last += 1
        if last > first:
            yield range(first, last)
        first = max(last, first + 1)
