"""Leases of the readers of a checkpoint server, and the queue in which they wait for their turns."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from http import HTTPStatus

from keepstep.state.staging import Snapshot
from keepstep.transfer.direct.http_requests import RequestError
from keepstep.transfer.direct.sending.admission import Admission
from keepstep_mesh.config.logging import get_logger

QUEUE_CHECK_SECONDS = 0.5
"""Interval at which a waiting request checks whether readers with a turn have become slow."""
LEASE_ENDED = "the lease has ended: the reader was too slow, or newer steps needed the memory"

log = get_logger("keepstep.transfer")


@dataclass(eq=False)
class Lease:
    """The right of one reader to a snapshot. Ends on request of the reader, or after the timeout without progress."""

    name: str
    snapshot: Snapshot
    expires: float
    holder: tuple[str, str, bytes] | None = None
    """Name of the reader, address where it serves chunks to other readers, and bitmap of these chunks."""
    timer: asyncio.TimerHandle | None = None
    senders: set[asyncio.Task[None]] = field(default_factory=set)
    """Tasks that send bytes to the reader, or wait to do so."""


class Leases:
    """The leases of one server. All methods run on its event loop.

    Args:
        timeout: seconds without progress after which a lease ends.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, timeout: float) -> None:
        self._loop = loop
        self._timeout = timeout
        self._leases: dict[str, Lease] = {}
        self._admission = Admission()
        self._turn_ended = asyncio.Event()

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, snapshot: Snapshot) -> Lease:
        """Return a new lease on ``snapshot``, which the caller holds. The end of the lease releases it."""
        name = secrets.token_urlsafe(16)
        self._leases[name] = lease = Lease(name, snapshot, self._loop.time() + self._timeout)
        self._admission.enter(name)
        self._expire_later(lease)
        return lease

    def get(self, name: str) -> Lease:
        """Return the lease ``name``. Raises ``RequestError`` if it has ended."""
        lease = self._leases.get(name)
        if lease is None:
            raise RequestError(HTTPStatus.GONE, LEASE_ENDED)
        return lease

    def renew(self, lease: Lease) -> None:
        """Restart the timeout of ``lease``."""
        lease.expires = self._loop.time() + self._timeout

    def record_progress(self, lease: Lease, now: float) -> None:
        """Record that the reader read a part of an answer."""
        lease.expires = now + self._timeout
        self._admission.record_progress(lease.name, now)

    def other_holders(self, lease: Lease) -> list[tuple[str, str, bytes]]:
        """Return the other readers of the same snapshot that serve chunks."""
        return [
            other.holder
            for other in self._leases.values()
            if other is not lease and other.snapshot is lease.snapshot and other.holder is not None
        ]

    def end(self, name: str) -> None:
        """End the lease ``name``, and cancel its senders."""
        lease = self._leases.pop(name, None)
        if lease is None:
            return
        if lease.timer is not None:
            lease.timer.cancel()
        for task in lease.senders:
            task.cancel()
        self._admission.leave(name)
        self._wake_queue()
        lease.snapshot.release()

    def end_all(self, snapshot: Snapshot | None = None) -> None:
        """End all leases on ``snapshot``. Default: on any snapshot."""
        for name, lease in list(self._leases.items()):
            if snapshot is None or lease.snapshot is snapshot:
                self.end(name)

    @contextlib.asynccontextmanager
    async def turn(
        self, lease: Lease, report: Callable[[int], Awaitable[None]], report_seconds: float | None
    ) -> AsyncIterator[None]:
        """Wait for a turn of the reader, which ends with the context.

        Args:
            report: called with the number of readers ahead, while the request waits.
            report_seconds: interval of the calls. None: no calls.
        """
        self._admission.wait(lease.name)
        reported_at = self._loop.time()
        try:
            while not self._admission.begin(lease.name, now := self._loop.time()):
                lease.expires = now + self._timeout  # a waiting reader is not slow
                if report_seconds is not None and now - reported_at >= report_seconds:
                    reported_at = now
                    await report(self._admission.ahead(lease.name))
                interval = QUEUE_CHECK_SECONDS if report_seconds is None else min(report_seconds, QUEUE_CHECK_SECONDS)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(interval):
                        await self._turn_ended.wait()
        except BaseException:
            self._admission.give_up(lease.name)
            self._wake_queue()
            raise
        try:
            yield
        finally:
            self._admission.end(lease.name)
            self._wake_queue()

    def _wake_queue(self) -> None:
        self._turn_ended.set()
        self._turn_ended = asyncio.Event()

    def _expire_later(self, lease: Lease) -> None:
        if self._loop.time() >= lease.expires:
            log.warning("reader without progress disconnected", step=lease.snapshot.step, seconds=self._timeout)
            self.end(lease.name)
        else:
            lease.timer = self._loop.call_at(lease.expires, self._expire_later, lease)
