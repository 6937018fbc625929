"""Send records of a group's steps to the metrics service, from rank 0 and in the background.

Until a metrics service has registered with the lighthouse, the newest records are kept (a few megabytes).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass

from keepstep.group.group_link import LinkSettings
from keepstep.group.ranks.rank_link import RankLink
from keepstep.runtime.loop_thread import LoopThread
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.net.http import Identity
from keepstep_mesh.protocol.telemetry_records import DurableRecord, StateRecord, StepRecord
from keepstep_mesh.security.tls import as_safe
from keepstep_mesh.telemetry.record_sender import Sender

GOODBYE_SECONDS = 1.0
"""Limit for sending the last records."""


@dataclass(slots=True)
class StepTimes:
    """Times of one attempt on the training thread."""

    began: float
    """``time.monotonic()``."""
    quorum_seconds: float = 0.0
    """Time that the training thread waited for the quorum."""
    heal_seconds: float = 0.0
    launched: float | None = None
    """``time.monotonic()`` when the last collective began."""
    retry_seconds: float = 0.0
    """From the first failure of the step to its end, without the waits above."""

    @property
    def waited(self) -> float:
        return self.quorum_seconds + self.heal_seconds

    @contextlib.contextmanager
    def retrying(self) -> Iterator[None]:
        """Measure ``retry_seconds``."""
        since, waited = time.monotonic(), self.waited
        try:
            yield
        finally:
            self.retry_seconds += time.monotonic() - since - (self.waited - waited)


class StepTelemetry:
    """On rank 0, sends records; on other ranks, does nothing."""

    def __init__(self, mesh: LoopThread, link: RankLink, settings: LinkSettings) -> None:
        self._mesh = mesh
        self._link = link
        self._asked = settings.session.addresses[0]
        self._values: dict[str, float] = {}
        self._ended: float | None = None
        """``time.monotonic()`` at the end of the last step."""
        self._sender: Sender | None = None
        if settings.rank == 0:
            identity = Identity(settings.token, settings.session.tls)
            self._sender = Sender("worker", link.replica_id, self._address, identity, job=settings.job)
            self._running = mesh.spawn(self._sender.run())

    def _address(self) -> str | None:
        found = (one.address for one in self._link.services if one.service == "metrics")
        address = next(found, None)
        return None if address is None else as_safe(address, self._asked)

    def values(self, values: dict[str, float]) -> None:
        """Send ``values`` with the step that ends next."""
        self._values.update(values)

    def state(self, state: str) -> None:
        """Record what the group does from now on, such as ``waiting_quorum``."""
        if self._sender is not None:
            self._sender.record(StateRecord(t=time.time(), state=state))

    def durable(self, step: int, every: int, nbytes: int, seconds: float, error: str) -> None:
        """Record the end of one write of a durable checkpoint. From any thread. ``error``: empty if it is committed."""
        if self._sender is not None:
            record = DurableRecord(t=time.time(), step=step, every=every, bytes=nbytes, seconds=seconds, error=error)
            self._sender.record(record)

    def resumed(self, step: int, every: int, committed: float) -> None:
        """Record the durable checkpoint that this group resumed from. ``committed``: Unix time of its commit."""
        if self._sender is not None:
            self._sender.record(DurableRecord(t=time.time(), step=step, every=every, committed=committed))

    def step(
        self,
        times: StepTimes,
        step: int,
        quorum_id: int,
        participants: int,
        *,
        committed: bool,
        reason: str = "",
        nonfinite: bool = False,
        retries: int = 0,
    ) -> None:
        """Record the end of a step. ``step``: number of committed steps after it."""
        now, before = time.monotonic(), times.began if self._ended is None else self._ended
        self._ended = now
        if self._sender is None:
            return
        values, self._values = self._values, {}
        waited = times.quorum_seconds + times.heal_seconds
        busy = None if times.launched is None else max(0.0, times.launched - before - waited)
        self._sender.record(
            StepRecord(
                t=time.time(),
                step=step,
                quorum_id=quorum_id,
                committed=committed,
                reason=reason,
                participants=participants,
                seconds=now - before,
                quorum_seconds=times.quorum_seconds,
                heal_seconds=times.heal_seconds,
                busy_seconds=busy,
                values=values,
                nonfinite=nonfinite,
                retries=retries,
                retry_seconds=times.retry_seconds if retries else 0.0,
            )
        )

    def close(self) -> None:
        """Send the records that are left, within ``GOODBYE_SECONDS``."""
        if self._sender is None:
            return
        self._running.cancel()
        with contextlib.suppress(TimeoutError, KeepstepError, OSError, RuntimeError, concurrent.futures.CancelledError):
            self._mesh.call(self._flush(self._sender), 2 * GOODBYE_SECONDS)

    @staticmethod
    async def _flush(sender: Sender) -> None:
        await asyncio.sleep(0)  # lets the cancelled batch end; the service counts a record that comes twice once
        await sender.flush(GOODBYE_SECONDS)
