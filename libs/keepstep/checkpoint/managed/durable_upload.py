"""The upload of one rank's part of a durable checkpoint to one relay, until the relay has committed all of it.

Several groups upload a share each of an equal state. A group that only follows asks for the outcome.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from keepstep.connection.deadline import Deadline
from keepstep.connection.http_connection import BrokenConnection, Connection, Endpoint, Refusal
from keepstep.connection.rate_limiter import RateLimiter
from keepstep.relay_client.relay_requests import Plan, RelayCheckpoint, put_chunk
from keepstep.relay_client.upload_share import UploadShare
from keepstep.state.errors import TransferError, TransferTimeout
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.net.backoff import Backoff
from keepstep_mesh.protocol.manifest import CHUNK_BYTES, Envelope
from keepstep_mesh.threads.starting import Thread

DURABLE_STALL_SECONDS = 20.0
"""Without a byte for this long, a connection is closed and opened again."""
DURABLE_POLL = Backoff(first=0.02, most=0.5)
"""Pause before the relay is asked again, while other ranks and groups upload."""
DURABLE_ERROR_BACKOFF = Backoff(first=0.1, most=5.0)
COPY_PATIENCE_SECONDS = 5.0
"""When a relay has committed a checkpoint, further copies fail after so long without progress: training may wait."""
COMMIT_SECONDS = 600.0
"""A relay may take this long to write a complete checkpoint to its tiers."""
DURABLE_ABORT_SECONDS = 2.0
"""To tell the relays that checkpoints have failed."""
FINAL = frozenset({400, 401, 403, 410, 413, 507})
"""Answers that do not change when the request is sent again."""

log = get_logger("keepstep.durable")


@dataclass(frozen=True, slots=True)
class Ticket:
    """Upload of one rank of one group."""

    job: str
    checkpoint: RelayCheckpoint
    step: int
    facts: Mapping[str, Any]
    """Fields with which the checkpoint begins at a relay."""
    uploaders: tuple[str, ...]
    producer: str
    """replica_id of this group."""
    follow_seconds: float
    """Pause between two requests for the outcome of an upload of other groups."""
    spare_relays: bool = False
    """Whether more relays are known than store it."""

    @property
    def uploads(self) -> bool:
        """Whether this group uploads a share."""
        return self.producer in self.uploaders


@dataclass(frozen=True, slots=True)
class StagedState:
    """The bytes of this rank's state."""

    manifest: bytes
    envelope: Envelope
    pack: memoryview


class DurableUpload:
    """Call ``run`` once, ``abort`` from any thread.

    Args:
        ticket: names the checkpoint.
        relay: stores it.
        staged: the state; None: only follow the upload of other groups.
        seconds: time without progress, of any rank, after which the upload fails.
        limiter: of the bandwidth.
        spare_relays: whether other relays could store it: one that accepts no connection fails soon then.
    """

    def __init__(
        self,
        ticket: Ticket,
        relay: Endpoint,
        staged: StagedState | None,
        seconds: float,
        limiter: RateLimiter,
        *,
        spare_relays: bool = False,
    ) -> None:
        self.address = relay.address
        self._ticket = ticket
        self._checkpoint = ticket.checkpoint
        self._relay = relay
        self._staged = staged
        self._limiter = limiter
        self._seconds = seconds
        self._reached = False
        first = min(seconds, COPY_PATIENCE_SECONDS) if spare_relays else seconds
        self._deadline = Deadline(first, f"step {ticket.step} was not stored at {relay.address}", float("inf"))
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self._share: UploadShare | None = None
        if staged is not None:
            place = ticket.uploaders.index(ticket.producer)
            self._share = UploadShare(place, len(ticket.uploaders), len(staged.envelope.chunk_digests))
        self._begun = False
        self._seen: object = None
        self._idle = 0
        self._complete_since: float | None = None
        self._problem = ""

    def abort(self) -> None:
        """End the upload soon. Does not wait."""
        self._ended.set()
        with self._lock:
            if self._connection is not None:
                self._connection.interrupt()

    def hurry(self) -> None:
        """Fail soon without progress, because another relay has committed the checkpoint. From any thread."""
        self._seconds = self._deadline.seconds = min(self._deadline.seconds, COPY_PATIENCE_SECONDS)
        self._deadline.progressed()

    def run(self) -> None:
        """Return when the relay has committed the checkpoint.

        Raises:
            TransferError: it will not. TransferTimeout: no progress was made.
        """
        failures = 0
        while True:
            try:
                with self._connected() as connection:
                    while not self._advance(connection):
                        failures = 0
                        self._pause()
                    return
            except TransferTimeout as error:
                raise TransferTimeout(
                    f"{error}{f'; last problem: {self._problem}' if self._problem else ''}"
                ) from error
            except (BrokenConnection, TransferError) as error:
                if self._ended.is_set() or (isinstance(error, Refusal) and self._is_final(error)):
                    raise TransferError(f"{self.address}: {error}") from error
                failures += 1
                self._problem = str(error)
                log.info("relay failed a durable checkpoint; retrying", relay=self.address, reason=str(error))
                pause = max(getattr(error, "retry_after", 0.0), DURABLE_ERROR_BACKOFF.seconds(failures))
                self._ended.wait(min(pause, self._deadline.remaining()))

    def _is_final(self, error: Refusal) -> bool:
        conflict = not self._begun and error.status == HTTPStatus.CONFLICT
        return error.status in FINAL or conflict

    # ---- one request after the other

    def _advance(self, connection: Connection) -> bool:
        """Do what is to be done next. Return whether the relay has committed the checkpoint."""
        if self._staged is None or self._share is None:
            return self._look(connection)
        if not self._begun:
            self._checkpoint.begin(connection, self._ticket.facts, again=False)  # another rank may have aborted it
            self._begun = True
        plan = self._plan(connection, self._staged)
        if not plan.agrees:
            self._share = None
            return False
        now = time.monotonic()
        if chunks := self._share.choose(plan.missing, now) if plan.missing else 0:
            self._put(connection, self._staged, chunks)
            self._share.sent(chunks, time.monotonic() - now)
            return False
        if plan.missing:
            self._note(plan.missing)
            return False
        return self._is_committed(self._checkpoint.report(connection))

    def _plan(self, connection: Connection, staged: StagedState) -> Plan:
        try:
            plan = self._checkpoint.plan(connection, staged.envelope.root)
            if plan.agrees and not plan.has_manifest:
                plan = self._checkpoint.put_manifest(connection, staged.manifest)
        except Refusal as refusal:
            self._begun = self._begun and refusal.status != HTTPStatus.NOT_FOUND  # a relay that restarted forgot it
            raise
        if not plan.agrees:
            log.error(
                "state differs from that of the group that stores it; following it",
                step=self._ticket.step,
                replica_id=self._ticket.producer,
            )
        return plan

    def _put(self, connection: Connection, staged: StagedState, chunks: int) -> None:
        sent: set[bytes] = set()
        for chunk, digest in enumerate(staged.envelope.chunk_digests):
            if not chunks >> chunk & 1 or digest in sent:
                continue
            data = staged.pack[chunk * CHUNK_BYTES : (chunk + 1) * CHUNK_BYTES]
            delay = self._limiter.delay(data.nbytes, time.monotonic())
            if self._ended.wait(min(delay, self._deadline.remaining())):
                raise TransferError("the upload was aborted")
            put_chunk(connection, digest, data)
            sent.add(digest)
            self._deadline.progressed()
            self._idle = 0

    def _look(self, connection: Connection) -> bool:
        try:
            return self._is_committed(self._checkpoint.show(connection))
        except Refusal as refusal:
            if refusal.status != HTTPStatus.NOT_FOUND:
                raise
            self._problem = "no group has begun to upload it"
            return False

    def _is_committed(self, view: dict[str, Any]) -> bool:
        if view["committed"] is not None:
            return True
        if view["state"] != "begun" and not view["lacking"]:
            self._complete_since = self._complete_since or time.monotonic()
            if time.monotonic() - self._complete_since < COMMIT_SECONDS:
                self._deadline.progressed()
        else:
            self._complete_since = None
        self._note((view["state"], view["lacking"]))
        return False

    def _note(self, seen: object) -> None:
        """Count a change at the relay as progress, also one that another process made."""
        if seen != self._seen:
            self._seen, self._idle = seen, 0
            self._deadline.progressed()

    # ---- the connection

    def _pause(self) -> None:
        self._idle += 1
        pause = DURABLE_POLL.seconds(self._idle)
        if self._share is None:
            pause = max(pause, self._ticket.follow_seconds)
        if self._ended.wait(min(pause, self._deadline.remaining())):
            raise TransferError("the upload was aborted")

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Connection]:
        connection = Connection(self._relay, self._deadline, DURABLE_STALL_SECONDS)
        with self._lock:
            self._connection = connection
        try:
            if self._ended.is_set():
                raise BrokenConnection("the upload was aborted")
            connection.connect()
            if not self._reached:
                self._reached, self._deadline.seconds = True, self._seconds
                self._deadline.progressed()
            yield connection
        finally:
            with self._lock:
                self._connection = None
            connection.close()


def tell_failures(relays: Mapping[str, Endpoint], failures: Sequence[tuple[Ticket, str]]) -> None:
    """Tell relays why checkpoints have failed, so that all ranks learn it at once. Never raises.

    Ends after ``DURABLE_ABORT_SECONDS``, whatever the number of relays and failures. The newest failures are first.

    Args:
        relays: by address.
        failures: uploads, and the reason of each.
    """
    threads = [
        Thread(target=_tell, args=(relay, failures), name="keepstep-durable-abort", daemon=True)
        for relay in relays.values()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _tell(relay: Endpoint, failures: Sequence[tuple[Ticket, str]]) -> None:
    connection = Connection(relay, Deadline(DURABLE_ABORT_SECONDS, "no answer to an abort"), DURABLE_ABORT_SECONDS)
    try:
        connection.connect()
        for ticket, reason in sorted(failures, key=lambda one: one[0].step, reverse=True):
            try:
                _abort(connection, ticket, reason)
            except Refusal as refusal:  # it is committed, another rank has aborted it, or the disk is full
                log.info("relay refused an abort", relay=relay.address, step=ticket.step, reason=str(refusal))
    except (BrokenConnection, TransferError) as error:
        log.info("failures of durable checkpoints did not reach a relay", relay=relay.address, reason=str(error))
    finally:
        connection.close()


def _abort(connection: Connection, ticket: Ticket, reason: str) -> None:
    try:
        ticket.checkpoint.abort(connection, reason)
    except Refusal as refusal:
        if refusal.status != HTTPStatus.NOT_FOUND:
            raise
        ticket.checkpoint.begin(connection, ticket.facts, again=False)  # a rank that is slower finds it aborted
        ticket.checkpoint.abort(connection, reason)


def run_all(uploads: list[DurableUpload]) -> dict[str, Exception | None]:
    """Run all uploads at once, on one thread each. Return the error of each, by address."""
    outcomes: dict[str, Exception | None] = {}

    def run(upload: DurableUpload) -> None:
        try:
            upload.run()
            outcomes[upload.address] = None
            for other in uploads:
                other.hurry()
        except TransferError as error:
            outcomes[upload.address] = error
        except Exception as error:
            log.exception("unexpected error in the upload of a durable checkpoint")
            outcomes[upload.address] = error

    threads = [Thread(target=run, args=(one,), name="keepstep-durable-relay", daemon=True) for one in uploads[1:]]
    for thread in threads:
        thread.start()
    for upload in uploads[:1]:
        run(upload)
    for thread in threads:
        thread.join()
    return outcomes
