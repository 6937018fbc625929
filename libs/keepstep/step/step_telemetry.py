"""What the metrics service is told of a group's steps, by its rank 0 in the background. Nothing waits for it.

Without a metrics service that registered with the lighthouse the newest records wait, a few megabytes at most.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import time
from dataclasses import dataclass

from keepstep.group.group_link import LinkSettings
from keepstep.group.rank_link import RankLink
from keepstep.runtime.loop_thread import LoopThread
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.net.http import Identity
from keepstep_mesh.protocol.telemetry_records import StateRecord, StepRecord
from keepstep_mesh.security.tls import as_safe
from keepstep_mesh.telemetry.record_sender import Sender

GOODBYE_SECONDS = 1.0


@dataclass(slots=True)
class StepTimes:
    """Of one attempt, as the training thread saw it."""

    began: float
    """``time.monotonic()``, as ``launched``."""
    quorum_seconds: float = 0.0
    """Waited for the quorum."""
    heal_seconds: float = 0.0
    launched: float | None = None
    """When its last collective began."""


class StepTelemetry:
    """Rank 0 tells; other ranks' calls do nothing."""

    def __init__(self, mesh: LoopThread, link: RankLink, settings: LinkSettings) -> None:
        self._mesh = mesh
        self._link = link
        self._asked = settings.session.addresses[0]
        self._values: dict[str, float] = {}
        self._ended: float | None = None
        """The step before, on the monotonic clock."""
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
        """Go with the step that ends next."""
        self._values.update(values)

    def state(self, state: str) -> None:
        """What the group does from now on, of what takes long enough to be seen before the step ends."""
        if self._sender is not None:
            self._sender.record(StateRecord(t=time.time(), state=state))

    def step(
        self, times: StepTimes, step: int, quorum_id: int, participants: int, *, committed: bool, reason: str = ""
    ) -> None:
        """A step has ended. ``step``: committed steps after it."""
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
            )
        )

    def close(self) -> None:
        """Sends what waits, within ``GOODBYE_SECONDS``."""
        if self._sender is None:
            return
        self._running.cancel()
        with contextlib.suppress(TimeoutError, KeepstepError, OSError, RuntimeError, concurrent.futures.CancelledError):
            self._mesh.call(self._flush(self._sender), 2 * GOODBYE_SECONDS)

    @staticmethod
    async def _flush(sender: Sender) -> None:
        await asyncio.sleep(0)  # the batch under way is given up first; what came twice is counted once
        await sender.flush(GOODBYE_SECONDS)
