"""Background writer of durable checkpoints: stages the state, uploads one checkpoint at a time, keeps the outcome.

The calling thread stages the state, and waits before the next change for what is still copied beside it. The thread of
the writer ends when nothing is left to upload. It is a daemon, so that a script that fails does not wait for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Any

from keepstep.checkpoint.managed.due_checkpoints import RelayHealth
from keepstep.checkpoint.managed.durable_upload import DurableUpload, Ticket, run_all, tell_failures
from keepstep.connection.http_connection import Endpoint, Refusal
from keepstep.connection.rate_limiter import RateLimiter
from keepstep.relay_client.uploading import Packed
from keepstep.state.staging import Snapshot, StagingArea
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.protocol.manifest import Origin
from keepstep_mesh.threads.starting import Thread

FAILING_WAIT_SECONDS = 2.0
"""Longest wait of ``offer`` while writes fail: a relay that is away must not slow down the training."""
WRITER_END_SECONDS = 10.0
"""For the threads to end after an abort."""

log = get_logger("keepstep.durable")


@dataclass(frozen=True, slots=True)
class LastCheckpoint:
    """Knowledge of this rank about the durable checkpoints of its job.

    Attributes:
        step: of the newest one that is known to be committed, or that the job resumed from; 0: none.
        id: its name at the relays.
        relays: addresses of the relays that committed it.
        uploading: step of the one that is being uploaded; 0: none.
        error: why the last write failed; empty: it did not.
        error_step: step of that write; 0: none failed.
        failing_since: Unix time of the first failure since the last success; None: the last write succeeded.
        skipped: a sentence about each newer checkpoint that the job did not resume from, because it is damaged.
    """

    step: int = 0
    id: str = ""
    relays: tuple[str, ...] = ()
    uploading: int = 0
    error: str = ""
    error_step: int = 0
    failing_since: float | None = None
    skipped: tuple[str, ...] = ()


Report = Callable[[int, int, float, str], None]


@dataclass(eq=False)
class _Work:
    ticket: Ticket
    relays: Sequence[Endpoint]
    snapshot: Snapshot | None
    """None: follow the upload of other groups."""
    uploads: list[DurableUpload] = field(default_factory=list)
    offered: float = field(default_factory=time.monotonic)
    withdrawn: str = ""
    """Why it is not wanted any more; empty: it is."""
    hurried: bool = False
    """See ``DurableWriter.hurry``."""


class DurableWriter:
    """Writer of one rank.

    Args:
        seconds: time without progress after which an upload fails; longest wait of ``offer``, unless writes fail.
        newest_wins: True: a checkpoint that waits for an upload is replaced by a newer one. False: ``offer`` waits.
        limiter: of the bandwidth of uploads.
        report: called at the end of each write, from any thread, with the step, the bytes of this rank, the seconds
            since the staging copy, and the error. Empty: it is committed.
    """

    def __init__(
        self, *, seconds: float, newest_wins: bool, limiter: RateLimiter, report: Report = lambda *_: None
    ) -> None:
        self.last = LastCheckpoint()
        self._report = report
        self._seconds = seconds
        self._newest_wins = newest_wins
        self._limiter = limiter
        self._area = StagingArea(lambda _: None)  # at most two are held: no reader has to go
        self._changed = threading.Condition()
        self._running: _Work | None = None
        self._next: _Work | None = None
        self._replaced: list[_Work] = []
        self._thread: Thread | None = None
        self._closed = False
        self._health = RelayHealth()

    def offer(self, ticket: Ticket, relays: Sequence[Endpoint], state: Any, *, late: bool = False) -> None:
        """Stage the state and upload it in the background, or follow the upload of other groups.

        Args:
            ticket: of the checkpoint.
            relays: to store it, at least one.
            state: copied before this returns, if this group uploads.
            late: tensors that no pass writes to may be copied until ``settle``.

        Raises:
            TimeoutError: an earlier checkpoint is still being uploaded.
            UnsupportedValue: the state has a value that cannot be stored.
        """
        snapshot = None
        if ticket.uploads:
            self._make_room(ticket)
            snapshot = self._area.stage(ticket.step, state, late=late)
            snapshot.hold()
        with self._changed:
            if snapshot is None and self._next is not None and self._next.snapshot is not None:
                return  # an upload that waits is worth more than the outcome of another one
            self._next = _Work(ticket, relays, snapshot)
            self._changed.notify_all()
            if self._running is not None and self._running.snapshot is None:
                self._withdraw(self._running, "")  # a newer checkpoint is more interesting than that outcome
            self._start()

    def settle(self) -> None:
        """Wait until nothing is copied any more. Call it on the training thread, before the state changes."""
        self._area.settle()

    def _start(self) -> None:
        if self._thread is None and not self._closed:
            thread = Thread(target=self._run, name="keepstep-durable", daemon=True)
            thread.start()
            self._thread = thread

    def refuse(self, ticket: Ticket, relays: Sequence[Endpoint], reason: str) -> None:
        """Note that this rank could not stage its state, and tell the other ranks if no other group can upload it."""
        self.failed(ticket.step, reason)
        if len(ticket.uploaders) == 1:
            with self._changed:
                self._replaced.append(_Work(ticket, relays, None, withdrawn=reason))
                self._start()

    def failed(self, step: int, reason: str) -> None:
        """Note that the checkpoint of ``step`` was not written."""
        log.error("durable checkpoint failed", step=step, reason=reason)
        with self._changed:
            since = self.last.failing_since or time.time()
            self.last = replace(self.last, error=reason, error_step=step, failing_since=since)
        self._report(step, 0, 0.0, reason)

    def usable(self, addresses: Iterable[str]) -> list[str]:
        """Return the relays to which the last upload did not fail a short time ago; all if it failed to each."""
        with self._changed:
            return self._health.usable(addresses, time.monotonic())

    def resumed(self, step: int, name: str, relays: tuple[str, ...], skipped: tuple[str, ...]) -> None:
        """Note that this rank was loaded from a checkpoint."""
        with self._changed:
            self.last = replace(self.last, step=step, id=name, relays=relays, skipped=skipped)

    def _make_room(self, ticket: Ticket) -> None:
        with self._changed:
            if self._newest_wins:
                if self._next is not None and self._next.snapshot is not None:
                    self._next.withdrawn = f"replaced by the checkpoint of step {ticket.step}"
                    if len(self._next.ticket.uploaders) == 1:  # else other groups may store it
                        self._replaced.append(self._next)
                    self._next.snapshot.release()
                self._next = None
                return
            failing = self.last.failing_since is not None
            seconds = min(self._seconds, FAILING_WAIT_SECONDS) if failing else self._seconds
            if not self._changed.wait_for(lambda: not self._is_busy(), seconds):
                step = self.last.uploading
                raise TimeoutError(f"the checkpoint of step {step} is still being uploaded after {seconds:g} s")

    def _is_busy(self) -> bool:
        return any(one is not None and one.snapshot is not None for one in (self._running, self._next))

    def hurry(self) -> None:
        """Fail uploads soon that make no progress: a rank that had to upload a part is lost. From any thread."""
        with self._changed:
            for work in (self._running, self._next):
                if work is not None:
                    work.hurried = True
                    for upload in work.uploads:
                        upload.hurry()

    def finish(self, seconds: float) -> bool:
        """Wait until this group has nothing left to upload, at most ``seconds``. Return whether that is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._is_busy(), seconds)

    def close(self) -> None:
        """End all uploads, and the threads. May be called more than once."""
        with self._changed:
            self._closed = True
            for work in (self._running, self._next):
                if work is not None:
                    self._withdraw(work, "training has ended in this process")
            thread = self._thread
        if thread is not None:
            thread.join(WRITER_END_SECONDS)
        self._area.close()

    def _withdraw(self, work: _Work, reason: str) -> None:
        work.withdrawn = reason or "a newer checkpoint is due"
        for upload in work.uploads:
            upload.abort()

    # ---- the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._running, self._next = self._next, None
                replaced, self._replaced = self._replaced, []
                work = self._running
                uploading = work.ticket.step if work is not None and work.snapshot is not None else 0
                self.last = replace(self.last, uploading=uploading)
                if work is None:
                    self._thread = None
                self._changed.notify_all()
            self._tell_failures(replaced)
            if work is None:
                return
            try:
                self._write(work)
            except Exception as error:
                log.exception("unexpected error in the writer of durable checkpoints", step=work.ticket.step)
                self.failed(work.ticket.step, f"{type(error).__name__}: {error}")
            finally:
                if work.snapshot is not None:
                    work.snapshot.release()

    def _write(self, work: _Work) -> None:
        started, ticket = time.monotonic(), work.ticket
        if work.snapshot is not None and (torn := work.snapshot.torn()):
            self.failed(ticket.step, torn)
            if len(ticket.uploaders) == 1:  # else other groups may store it
                work.withdrawn = torn
                self._tell_failures([work])
            return
        packed = None if work.snapshot is None else _packed(work.snapshot, ticket)
        with self._changed:
            work.uploads = [DurableUpload(ticket, relay, packed, self._seconds, self._limiter) for relay in work.relays]
            if work.withdrawn:
                self._withdraw(work, work.withdrawn)
            for upload in work.uploads if work.hurried else ():
                upload.hurry()
        outcomes = run_all(work.uploads)
        if not work.withdrawn:
            self._note_health(outcomes)
        stored = tuple(sorted(address for address, error in outcomes.items() if error is None))
        problems = "; ".join(str(error) for error in outcomes.values() if error is not None)
        if stored:
            self._committed(ticket, stored, problems)
            nbytes = 0 if work.snapshot is None else work.snapshot.pack.nbytes
            self._report(ticket.step, nbytes, time.monotonic() - work.offered, "")
            log.info(
                "durable checkpoint committed",
                step=ticket.step,
                id=ticket.checkpoint.id,
                relays=len(stored),
                seconds=round(time.monotonic() - started, 3),
            )
        elif not work.withdrawn:
            self.failed(ticket.step, problems)
            if work.snapshot is not None:
                work.withdrawn = problems
                self._tell_failures([work])
        elif work.snapshot is not None:
            self.failed(ticket.step, work.withdrawn)

    def _note_health(self, outcomes: Mapping[str, Exception | None]) -> None:
        with self._changed:
            for address, error in outcomes.items():
                if error is None:
                    self._health.worked(address)
                elif not (isinstance(error.__cause__, Refusal) and error.__cause__.status == HTTPStatus.GONE):
                    self._health.failed(address, time.monotonic())  # else another rank has given up

    def _committed(self, ticket: Ticket, stored: tuple[str, ...], problems: str) -> None:
        if problems:
            log.warning("fewer copies of a durable checkpoint than wanted", step=ticket.step, reason=problems)
        with self._changed:
            self.last = replace(
                self.last,
                step=ticket.step,
                id=ticket.checkpoint.id,
                relays=stored,
                error="",
                error_step=0,
                failing_since=None,
            )

    def _tell_failures(self, failed: Sequence[_Work]) -> None:
        """Abort checkpoints at their relays: the other ranks need not wait for them."""
        relays = {relay.address: relay for work in failed for relay in work.relays}
        tell_failures(relays, [(work.ticket, work.withdrawn) for work in failed])


def _packed(snapshot: Snapshot, ticket: Ticket) -> Packed:
    quorum_id = int(ticket.facts["quorum_id"])
    one = ticket.checkpoint
    origin = Origin(one.id, one.job, ticket.step, quorum_id, one.producer)
    return Packed.of(snapshot.build_manifest(origin), snapshot.pack)
