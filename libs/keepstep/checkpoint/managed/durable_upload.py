"""The upload of one rank's part of a durable checkpoint to one relay, until the relay has committed all of it.

Several groups upload a share each of an equal state. A group that only follows asks for the outcome.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

from keepstep.connection.deadline import Deadline
from keepstep.connection.http_connection import BrokenConnection, Endpoint, Refusal
from keepstep.connection.rate_limiter import RateLimiter
from keepstep.relay_client.relay_link import RelayLink
from keepstep.relay_client.relay_requests import RelayCheckpoint, View
from keepstep.relay_client.upload_share import UploadShare
from keepstep.relay_client.uploading import Packed, RelayUpload, StatesDiffer
from keepstep.state.errors import TransferError, TransferTimeout
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.net.backoff import Backoff
from keepstep_mesh.threads.starting import Thread

DURABLE_STALL_SECONDS = 20.0
"""Without a byte for this long, a connection is closed and opened again."""
DURABLE_POLL = Backoff(first=0.02, most=0.5)
"""Pause before the relay is asked again, while other ranks and groups upload."""
COPY_PATIENCE_SECONDS = 5.0
"""When a relay has committed a checkpoint, further copies fail after so long without progress: training may wait."""
COMMIT_SECONDS = 600.0
"""A relay may take this long to write a complete checkpoint to its tiers."""
DURABLE_ABORT_SECONDS = 2.0
"""To tell the relays that checkpoints have failed."""

log = get_logger("keepstep.durable")


@dataclass(frozen=True, slots=True)
class Ticket:
    """Upload of one rank of one group."""

    checkpoint: RelayCheckpoint
    """Its producer is the replica_id of this group."""
    step: int
    facts: Mapping[str, Any]
    """Fields with which the checkpoint begins at a relay."""
    uploaders: tuple[str, ...]
    follow_seconds: float
    """Pause between two requests for the outcome of an upload of other groups."""
    spare_relays: bool = False
    """Whether more relays are known than store it: one that accepts no connection fails soon then."""

    @property
    def uploads(self) -> bool:
        """Whether this group uploads a share."""
        return self.checkpoint.producer in self.uploaders


class DurableUpload:
    """Call ``run`` once, ``abort`` from any thread.

    Args:
        ticket: names the checkpoint.
        relay: stores it.
        packed: the state of this rank; None: only follow the upload of other groups.
        seconds: time without progress, of any rank, after which the upload fails.
        limiter: of the bandwidth.
    """

    def __init__(
        self,
        ticket: Ticket,
        relay: Endpoint,
        packed: Packed | None,
        seconds: float,
        limiter: RateLimiter,
    ) -> None:
        self.address = relay.address
        self._ticket = ticket
        self._packed = packed
        self._seconds = seconds
        first = min(seconds, COPY_PATIENCE_SECONDS) if ticket.spare_relays else seconds
        self._deadline = Deadline(first, f"step {ticket.step} was not stored at {relay.address}", math.inf)
        self._reached = False
        self._link = RelayLink(
            [relay], self._deadline, patience=DURABLE_STALL_SECONDS, on_connected=self._note_connection
        )
        # another rank may have aborted it
        self._upload = RelayUpload(self._link, ticket.checkpoint, ticket.facts, again=False, limiter=limiter)
        self._seen: object = None
        self._idle = 0
        self._complete_since: float | None = None
        self._problem = ""

    def _note_connection(self) -> None:
        if not self._reached:
            self._reached, self._deadline.seconds = True, self._seconds
            self._deadline.progressed()

    def abort(self) -> None:
        """End the upload soon. Does not wait."""
        self._link.interrupt()

    def hurry(self) -> None:
        """Fail soon without progress, because another relay has committed the checkpoint. From any thread."""
        self._seconds = self._deadline.seconds = min(self._deadline.seconds, COPY_PATIENCE_SECONDS)
        self._deadline.progressed()

    def run(self) -> None:
        """Return when the relay has committed the checkpoint.

        Raises:
            TransferError: it will not. TransferTimeout: no progress was made.
        """
        try:
            while not self._is_committed(self._look() if self._packed is None else self._send(self._packed)):
                self._pause()
        except TransferTimeout as error:
            raise TransferTimeout(f"{error}{f'; last problem: {self._problem}' if self._problem else ''}") from error
        except TransferError as error:
            raise TransferError(f"{self.address}: {error}") from error
        finally:
            self._link.close()

    def _send(self, packed: Packed) -> View | None:
        """Upload until the relay has all of this rank, and return its view. None: it has another state."""
        ticket = self._ticket
        place = ticket.uploaders.index(ticket.checkpoint.producer)
        share = UploadShare(place, len(ticket.uploaders), len(packed.envelope.chunk_digests))
        try:
            return self._upload.send(packed, share, self._wait)
        except StatesDiffer:
            log.error(
                "state differs from that of the group that stores it; following it",
                step=ticket.step,
                replica_id=ticket.checkpoint.producer,
            )
            self._packed = None
            return None

    def _wait(self, missing: int) -> None:
        self._note(missing)
        self._pause()

    def _look(self) -> View | None:
        try:
            return self._link.ask(self._ticket.checkpoint.show)
        except Refusal as refusal:
            if refusal.status != HTTPStatus.NOT_FOUND:
                raise
            self._problem = "no group has begun to upload it"
            return None

    def _is_committed(self, view: View | None) -> bool:
        if view is None:
            return False
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

    def _pause(self) -> None:
        self._idle += 1
        pause = DURABLE_POLL.seconds(self._idle)
        if self._packed is None:
            pause = max(pause, self._ticket.follow_seconds)
        self._link.pause(pause)


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
    deadline = Deadline(DURABLE_ABORT_SECONDS, "no answer to an abort")
    link = RelayLink([relay], deadline, patience=DURABLE_ABORT_SECONDS, once=True)
    try:
        for ticket, reason in sorted(failures, key=lambda one: one[0].step, reverse=True):
            try:
                _abort(link, ticket, reason)
            except Refusal as refusal:  # it is committed, another rank has aborted it, or the disk is full
                log.info("relay refused an abort", relay=relay.address, step=ticket.step, reason=str(refusal))
    except (BrokenConnection, TransferError) as error:
        log.info("failures of durable checkpoints did not reach a relay", relay=relay.address, reason=str(error))
    finally:
        link.close()


def _abort(link: RelayLink, ticket: Ticket, reason: str) -> None:
    abort = partial(ticket.checkpoint.abort, reason=reason)
    try:
        link.ask(abort)
    except Refusal as refusal:
        if refusal.status != HTTPStatus.NOT_FOUND:
            raise
        link.ask(partial(ticket.checkpoint.begin, facts=ticket.facts, again=False))  # a slower rank finds it aborted
        link.ask(abort)


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
