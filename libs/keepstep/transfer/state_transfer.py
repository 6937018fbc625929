"""The transfer of one state: receives the manifest from the source group, and the chunks through a ``ChunkSource``.

``direct`` fetches the chunks from the source too; ``relayed`` from relays and from other groups that heal.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from typing import Any, Protocol

from keepstep.connection.deadline import Deadline
from keepstep.connection.http_connection import BrokenConnection, Connection, Endpoint, Refusal
from keepstep.state.errors import StateMismatch, TransferError
from keepstep.state.restoring import Destination, Spare
from keepstep.state.state_manifest import Manifest, read_content, read_manifest
from keepstep.transfer.exchange import Progress
from keepstep.transfer.receiving import digest_of
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import ManifestError
from keepstep_mesh.net.backoff import Backoff
from keepstep_mesh.protocol.manifest import MAX_MANIFEST_BYTES, chunk_length
from keepstep_mesh.security.tokens import ClientToken

STALL_SECONDS = 10.0
"""Without a byte for this long, a connection is closed and opened again."""
MAX_FAILURES = 5
"""Broken connections in a row, without a chunk between them, after which the source counts as lost."""
RETRY_BACKOFF = Backoff(first=0.05, most=1.0)
CANNOT_BE_SENT = HTTPStatus.UNPROCESSABLE_ENTITY
"""Status of a request for a state that the source can never send."""
WAIT_SHARE = 0.9
"""Share of the remaining time that the source may wait for the step, so that its answer arrives before the deadline."""

log = get_logger("keepstep.transfer")


class ChunkSource(Protocol):
    """Receives the chunks of one transfer."""

    needs_digests: bool
    """Whether it needs the digests of all chunks before it begins."""

    def receive_chunks(self) -> None:
        """Receive every chunk into the destination of the transfer, and verify it."""

    def source_lost(self, reason: str) -> None:
        """React to the loss of the group that the state comes from. Called from any thread."""

    def wake(self) -> None:
        """Wake the threads that wait: the transfer has ended. Called from any thread."""


class Transfer:
    """One state from one source. Call ``run`` once; call ``abort`` from any thread.

    Args:
        base_url: ``http://host:port`` of the source.
        step: the step of the state.
        timeout: seconds for the whole transfer; with ``limit``, seconds without progress. A byte of the state is
            progress, and so is a message of the source that this reader waits for its turn.
        chunks: creates the source of the chunks.
        token: token of the job.
        progress: called with the bytes received and the bytes in all.
        limit: seconds for the whole transfer.
        spare: memory that a failed attempt left. Its valid chunks, and those in ``into``, are not fetched again; empty
            if only ``into`` may have some. None: this is the first attempt.
    """

    def __init__(
        self,
        base_url: str,
        step: int,
        timeout: float,
        chunks: Callable[[Transfer], ChunkSource],
        *,
        token: ClientToken,
        progress: Progress | None,
        limit: float | None = None,
        spare: Spare | None = None,
    ) -> None:
        self.source = Endpoint.of(base_url, token.peer_headers)
        self.step = step
        self.deadline = Deadline(timeout, f"step {step} from {base_url} was not received", limit)
        self.manifest: Manifest | None = None
        """None: the digests of the chunks are not here yet."""
        self.lease = ""
        """Name of the lease on the snapshot of the source."""
        self.has_begun = False
        """Whether the manifest, or its content, was received."""
        self.ended: BaseException | None = None
        """The error that ended the transfer early."""
        self.bytes_done = 0
        self._progress = progress
        self._destination: Destination | None = None
        self._spare, self._had_spare = spare, spare is not None
        self._lock = threading.Lock()
        self._open: set[Connection] = set()
        self._wake = threading.Event()
        self._torn = False
        self._content_bytes = b""
        self._chunks = chunks(self)

    @property
    def destination(self) -> Destination:
        """Memory of the chunks. Only valid while ``receive_chunks`` runs."""
        assert self._destination is not None
        return self._destination

    def take_spare(self) -> Spare | None:
        """Return memory for the next attempt, after this one failed. None: no attempt received anything."""
        spare, self._spare = self._spare, None
        return spare

    def run(self, into: Any = None) -> Any:
        """Receive the state.

        Args:
            into: see ``CheckpointTransport.recv_checkpoint``.

        Raises:
            TransferError, TransferTimeout, ManifestError: the state was not received.
        """
        try:
            self.retry(self._begin)
            self.has_begun = True
            try:
                destination = self._destination = Destination(self._content, into, self._spare)
                self._spare = destination.fresh
                self._torn = destination.in_place_bytes > 0
                self._chunks.receive_chunks()
            finally:
                self._give_back_lease()
            state = destination.result()
            self._spare = None
            return state
        except TransferError as error:
            error.torn = self._torn
            raise
        finally:
            self._destination = None  # its memory must not wait for the garbage collector

    def abort(self, reason: str) -> None:
        """Make ``run`` raise ``TransferError`` at once."""
        self.end(TransferError(f"receiving step {self.step} was aborted: {reason}"))

    def source_lost(self, reason: str) -> None:
        """React to the loss of the group that the state comes from. Called from any thread."""
        self._chunks.source_lost(reason)

    def end(self, error: BaseException) -> None:
        """Make ``run`` raise ``error``, unless it has ended already. Called from any thread."""
        with self._lock:
            self.ended = self.ended or error
            self._wake.set()
        self.interrupt_connections()
        self._chunks.wake()

    def retry(self, work: Callable[[Connection], None]) -> None:
        """Run ``work`` on a connection to the source, and on a new one after each broken connection."""
        failures, bytes_done = 0, self.bytes_done
        while True:
            try:
                with self.connect(self.source) as connection:
                    return work(connection)
            except BrokenConnection as error:
                if self.ended is not None:
                    raise self.ended from error
                failures = failures + 1 if self.bytes_done == bytes_done else 1
                bytes_done = self.bytes_done
                if failures == MAX_FAILURES:
                    raise TransferError(f"the source of step {self.step} is lost: {error}") from error
                log.info("connection broken, transfer continues", step=self.step, reason=str(error), failures=failures)
                self._wake.wait(min(RETRY_BACKOFF.seconds(failures), self.deadline.remaining()))

    @contextlib.contextmanager
    def connect(self, to: Endpoint, patience: float = STALL_SECONDS) -> Iterator[Connection]:
        """Open a connection that the context closes."""
        connection = self.open(to, patience)
        try:
            yield connection
        finally:
            self.close(connection)

    def open(self, to: Endpoint, patience: float) -> Connection:
        """Return a new connection, which ``abort`` interrupts until ``close``."""
        connection = Connection(to, self.deadline, patience)
        with self._lock:
            ended = self.ended
            self._open.add(connection)
        try:
            if ended is not None:
                raise ended
            connection.connect()
        except BaseException:
            self.close(connection)
            raise
        return connection

    def close(self, connection: Connection) -> None:
        """Close a connection of ``open``."""
        with self._lock:
            self._open.discard(connection)
            connection.close()

    def interrupt_connections(self) -> None:
        """End every call on a connection of this transfer. Called from any thread."""
        with self._lock:
            for connection in self._open:
                connection.interrupt()

    def read_short(self, connection: Connection, length: int) -> bytes:
        """Read a body other than chunks. Raises ``ManifestError`` if it is longer than the limit for a manifest."""
        if length > MAX_MANIFEST_BYTES:
            raise ManifestError(f"manifest too long: {length} bytes (limit {MAX_MANIFEST_BYTES})")
        return bytes(connection.read(length))

    def receive_digests(self, connection: Connection) -> None:
        """Set ``manifest``, for a transfer that began without the digests."""
        _, length = connection.ask("GET", f"/manifest/{self.lease}", patience=self.deadline.remaining())
        manifest = self._read_manifest(self.read_short(connection, length))
        if manifest.content_bytes != self._content_bytes:
            raise TransferError(f"the content of the manifest of step {self.step} arrived damaged")
        self.manifest = manifest

    def chunks_here(self, digests: Sequence[bytes]) -> int:
        """Return the chunks that the destination has already, as bits. They count as received."""
        here = 0
        for chunk, digest in enumerate(digests) if self._had_spare else ():
            if digest_of(self.destination.segments(chunk)) == digest:
                here |= 1 << chunk
                self.count(chunk_length(self.destination.pack_bytes, chunk))
        if here:
            log.info("chunks are here already", step=self.step, chunks=here.bit_count(), of=len(digests))
        return here

    def count(self, size: int) -> None:
        """Count ``size`` bytes as received."""
        with self._lock:
            self.bytes_done += size
            if self._progress is not None:
                self._progress(self.bytes_done, self.destination.pack_bytes)

    def _begin(self, connection: Connection) -> None:
        """Receive the manifest, or only its content if possible: the source then hashes the chunks while it sends."""
        if self._chunks.needs_digests or self._spare is not None:
            self.manifest = self._read_manifest(self._receive_head(connection, "checkpoint"))
            self._content = self.manifest.content
        else:
            self._content_bytes = self._receive_head(connection, "content")
            self._content = read_content(self._content_bytes)

    def _receive_head(self, connection: Connection, kind: str) -> bytes:
        """Receive the manifest or its content, and the name of the lease."""
        remaining = self.deadline.remaining()
        wait = remaining * WAIT_SHARE
        try:
            fields, length = connection.ask("GET", f"/{kind}/{self.step}?wait={wait:.3f}", patience=remaining)
        except Refusal as refusal:
            if refusal.status == CANNOT_BE_SENT:
                raise StateMismatch(str(refusal)) from refusal
            raise
        self.lease = fields.get("keepstep-lease", "")
        return self.read_short(connection, length)

    def _read_manifest(self, data: bytes) -> Manifest:
        manifest = read_manifest(data)
        if manifest.origin.step != self.step:
            raise ManifestError(f"wrong step in the manifest: asked for {self.step}, got {manifest.origin.step}")
        return manifest

    def _give_back_lease(self) -> None:
        """End the lease, so that the source can reuse the memory at once, not only when the lease expires."""
        try:
            with self.connect(self.source, 1.0) as connection:
                connection.ask("DELETE", f"/lease/{self.lease}")
        except (BrokenConnection, TransferError) as error:
            log.info("lease not given back, it will expire", step=self.step, reason=str(error))
