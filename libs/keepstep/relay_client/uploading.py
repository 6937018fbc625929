"""The upload of the part of one rank to one relay: begin, plan, manifest, chunks, result.

A relay that restarts may have lost the upload, or a part of it. Then it is begun again, and continues with what is
missing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, NoReturn, TypeVar

from keepstep.connection.http_connection import Connection, Refusal
from keepstep.connection.rate_limiter import RateLimiter
from keepstep.relay_client.relay_link import RelayLink
from keepstep.relay_client.relay_requests import Plan, RelayCheckpoint, View, put_chunk
from keepstep.relay_client.upload_share import UploadShare
from keepstep.state.errors import TransferError
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.protocol.manifest import CHUNK_BYTES, Envelope, read_envelope
from keepstep_mesh.threads.starting import ThreadPoolExecutor

STREAMS = 4
"""Chunks of an upload that nothing else waits for, and that are sent at a time."""
MAX_LOSSES = 10
"""Restarts of the relay that one step of an upload outlives."""
LOST = frozenset({HTTPStatus.NOT_FOUND})
INCOMPLETE = frozenset({HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT})
"""Answers to a chunk and to a result after a restart of the relay: the upload, the manifest, or a chunk is missing."""

T = TypeVar("T")

log = get_logger("keepstep.relay_client")


@dataclass(frozen=True)
class Packed:
    """The state of one rank, as it is uploaded."""

    manifest: bytes
    envelope: Envelope
    """Of the manifest."""
    chunk: Callable[[int], memoryview]
    """Returns the bytes of a chunk. Called from several threads."""

    @classmethod
    def of(cls, manifest: bytes, data: memoryview) -> Packed:
        """Return a state whose pack is in memory."""
        return cls(
            manifest,
            read_envelope(manifest),
            lambda number: data[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES],
        )


class StatesDiffer(TransferError):
    """The relay has another state of this rank already."""


class _Lost(TransferError):
    """The relay does not have the upload, or a part of it: it has restarted."""


class RelayUpload:
    """The upload of one rank.

    Args:
        link: to the relay.
        checkpoint: the rank.
        facts: fields with which the checkpoint begins.
        again: whether to begin a checkpoint that was deleted.
        streams: chunks that are sent at a time.
        limiter: of the bandwidth. None: no limit.
        needs_disk: False: the relay may have the chunks in memory only, because its disk is full.
    """

    def __init__(
        self,
        link: RelayLink,
        checkpoint: RelayCheckpoint,
        facts: Mapping[str, Any],
        *,
        again: bool = True,
        streams: int = 1,
        limiter: RateLimiter | None = None,
        needs_disk: bool = True,
    ) -> None:
        self._link = link
        self._checkpoint = checkpoint
        self._facts = facts
        self._again = again
        self._streams = streams
        self._limiter = limiter
        self._needs_disk = needs_disk
        self._begun = False
        self._lock = threading.Lock()
        self.sent_bytes = 0
        """Bytes of chunks that the relay has accepted."""

    # ---- steps of the upload

    def begin(self) -> View:
        """Begin the checkpoint, or join it. Return the relay's view of it."""
        view = self._link.ask(lambda connection: self._checkpoint.begin(connection, self._facts, again=self._again))
        if self._facts.get("overwrite"):
            self._checkpoint.pin(view)
        self._begun, self._again = True, False  # what another rank has aborted since is not begun again
        return view

    def send(
        self, packed: Packed, share: UploadShare | None = None, wait: Callable[[int], object] = lambda _missing: None
    ) -> View:
        """Upload until no chunk is missing, and report it.

        Args:
            packed: the state of this rank.
            share: chooses the chunks that this process sends. None: all.
            wait: called with the missing chunks (bits) while other processes send them. Waits, and may raise.

        Returns:
            The relay's view of the checkpoint. It is not committed while other ranks upload.

        Raises:
            StatesDiffer: see ``announce``.
            Refusal: the relay refuses the upload; 410: it was aborted.
        """

        def upload() -> View:
            while missing := self.announce(packed):
                began = time.monotonic()
                mine = missing if share is None else share.choose(missing, began)
                if not mine:
                    wait(missing)
                    continue
                self.put(packed, mine)
                if share is not None:
                    share.sent(mine, time.monotonic() - began)
            return self.report()

        return self.until_kept(upload)

    def announce(self, packed: Packed) -> int:
        """Report the state of this rank. Return the chunks that the relay does not have, as bits.

        Raises:
            StatesDiffer: the relay has another state of this rank, of another process.
        """

        def plan() -> Plan:
            if not self._begun:
                self.begin()
            found = self.ask(lambda connection: self._checkpoint.plan(connection, packed.envelope.root))
            if found.agrees and not found.has_manifest:
                found = self.ask(lambda connection: self._checkpoint.put_manifest(connection, packed.manifest))
            return found

        found = self.until_kept(plan)
        if not found.agrees:
            raise StatesDiffer(f"rank {self._checkpoint.rank} of checkpoint {self._checkpoint.id} has another state")
        return found.missing

    def put(self, packed: Packed, chunks: int) -> None:
        """Upload ``chunks`` (bits); equal ones once."""
        digests = packed.envelope.chunk_digests
        numbers = {digests[number]: number for number in range(chunks.bit_length()) if chunks >> number & 1}
        if min(self._streams, len(numbers)) <= 1:
            for digest, number in numbers.items():
                self._put_chunk(digest, packed.chunk(number))
            return

        def put(digest: bytes, number: int) -> None:
            self._put_chunk(digest, packed.chunk(number))

        with ThreadPoolExecutor(min(self._streams, len(numbers)), "keepstep-upload") as pool:
            running = [pool.submit(put, *one) for one in numbers.items()]
            try:
                for one in running:
                    one.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _put_chunk(self, digest: bytes, data: memoryview) -> None:
        if self._limiter is not None:
            self._link.pause(self._limiter.delay(data.nbytes, time.monotonic()))
        try:
            self.ask(lambda connection: put_chunk(connection, digest, data), lost=INCOMPLETE)
        except Refusal as refusal:
            if self._needs_disk or refusal.status != HTTPStatus.INSUFFICIENT_STORAGE:
                raise
        self._link.deadline.progressed()
        with self._lock:
            self.sent_bytes += data.nbytes

    def report(self, *, part: bool = False) -> View:
        """Report that the upload is complete; see ``RelayCheckpoint.report``."""
        return self.ask(lambda connection: self._checkpoint.report(connection, part=part), lost=INCOMPLETE)

    # ---- uploads that the relay has lost

    def ask(self, request: Callable[[Connection], T], *, lost: frozenset[int] = LOST) -> T:
        """Return what ``request`` returns. Call it within ``until_kept``.

        Args:
            request: sends one request.
            lost: statuses of its answer that mean that the relay has lost the upload.
        """
        try:
            return self._link.ask(request)
        except Refusal as refusal:
            if refusal.status in lost:
                raise _Lost(str(refusal)) from refusal
            raise

    def until_kept(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns. If the relay has lost the upload, begin it again and repeat ``work``."""
        losses = 0
        while True:
            try:
                return work()
            except _Lost as error:
                losses += 1
                if losses > MAX_LOSSES:
                    self._give_up(losses, error)
                log.warning("the relay lost the upload; beginning again", checkpoint=self._checkpoint.id)
                self._link.deadline.remaining()
                self.begin()

    def _give_up(self, losses: int, error: _Lost) -> NoReturn:
        raise TransferError(
            f"the relay lost the upload {losses} times, perhaps because it is older than this build ({error}): update "
            f"the relay"
        ) from error
