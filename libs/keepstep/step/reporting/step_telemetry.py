"""Report the steps of this rank: to the metrics service (rank 0), to a callback of the script, and to OpenTelemetry.

All three get the same ``StepRecord``. Until a metrics service has registered with the lighthouse, the newest records
are kept (a few megabytes).
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

from keepstep.group.group_link import LinkSettings
from keepstep.group.quorum_plan import QuorumPlan
from keepstep.group.ranks.rank_link import RankLink
from keepstep.runtime.loop_thread import LoopThread
from keepstep.step.reporting.scalars import scalars_of
from keepstep.step.reporting.step_trace import StepTrace, TracedRank
from keepstep_mesh.config.log_limiter import LogLimiter
from keepstep_mesh.config.logging import get_logger
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.net.http import Identity
from keepstep_mesh.protocol import names
from keepstep_mesh.protocol.telemetry_records import DurableRecord, StateRecord, StepRecord
from keepstep_mesh.security.tls import as_safe
from keepstep_mesh.telemetry.record_sender import Sender
from keepstep_mesh.telemetry.tracing import exporting

log = get_logger("keepstep.telemetry")

REPORT_WAIT_SECONDS = 0.5
"""After this time the metrics service learns that the group waits for a quorum."""


OnStep = Callable[[dict[str, float], int], None]
"""Gets the scalars of a committed step, and the number of committed steps."""


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
    trace: StepTrace | None = None
    """When its phases happened, for OpenTelemetry; None: no spans are exported."""

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
    """Reports steps. Rank 0 sends records to the metrics service.

    Args:
        loop_thread: thread of the sender.
        link: of this rank.
        settings: of the link.
        on_step: the callback of the script, or None.

    Raises:
        ValueError: ``KEEPSTEP_OTEL`` is invalid.
    """

    def __init__(
        self, loop_thread: LoopThread, link: RankLink, settings: LinkSettings, on_step: OnStep | None = None
    ) -> None:
        self._loop_thread = loop_thread
        self._link = link
        self._asked = settings.session.addresses[0]
        self._on_step = on_step
        self._callback_errors = LogLimiter()
        self._discarded = 0
        """Number of steps discarded since the last committed one."""
        self._values: dict[str, float] = {}
        self._ended: float | None = None
        """``time.monotonic()`` at the end of the last step."""
        self._origin = TracedRank(settings.job, link.replica_id, settings.rank)
        rank = settings.rank
        self._export = exporting.begin(
            "trainer",
            f"{link.replica_id}/{rank}",
            {"job": settings.job, "group": names.name_of(link.replica_id), "replica_id": link.replica_id, "rank": rank},
        )
        self._sender: Sender | None = None
        if rank == 0:
            identity = Identity(settings.token, settings.session.tls)
            self._sender = Sender("worker", link.replica_id, self._address, identity, job=settings.job)
            self._running = loop_thread.spawn(self._sender.run())

    def new_trace(self) -> StepTrace | None:
        """Return the trace of a step that begins; None: no spans are exported."""
        export = self._export
        return None if export is None else StepTrace(self._origin, export.enter)

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

    def resumed(self, step: int, every: int, committed: float, skipped: Iterable[str]) -> None:
        """Record the durable checkpoint that this group resumed from.

        Args:
            step: of the checkpoint.
            every: steps between two checkpoints.
            committed: Unix time of its commit.
            skipped: ids of newer checkpoints, which are damaged.
        """
        if self._sender is not None:
            named = " ".join(skipped)
            record = DurableRecord(t=time.time(), step=step, every=every, committed=committed, skipped=named)
            self._sender.record(record)

    def step(
        self,
        times: StepTimes,
        step: int,
        plan: QuorumPlan | None,
        participants: int,
        *,
        committed: bool,
        reason: str = "",
        nonfinite: bool = False,
        retries: int = 0,
    ) -> None:
        """Record the end of a step. ``step``: number of committed steps after it. ``plan``: None: no quorum formed."""
        now, before = time.monotonic(), times.began if self._ended is None else self._ended
        self._ended = now
        if self._sender is None and self._export is None and self._on_step is None:
            return
        values, self._values = self._values, {}
        waited = times.quorum_seconds + times.heal_seconds
        busy = None if times.launched is None else max(0.0, times.launched - before - waited)
        record = StepRecord(
            t=time.time(),
            step=step,
            quorum_id=plan.quorum_id if plan else 0,
            epoch=plan.epoch if plan else 0,
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
        if self._sender is not None:
            self._sender.record(record)
        self._export_trace(times.trace, before, now, record)
        if self._on_step is not None:
            self._call(self._on_step, record)

    def without_step(self, times: StepTimes) -> None:
        """Export the spans of an attempt that was neither committed nor discarded: it served to heal."""
        self._export_trace(times.trace, times.began, time.monotonic(), None)

    def _export_trace(self, trace: StepTrace | None, began: float, ended: float, record: StepRecord | None) -> None:
        if self._export is not None and trace is not None:
            self._export.leave()
            self._export.add(partial(trace.spans, began, ended, record, self._export.wanted, time.time() - ended))

    def _call(self, on_step: OnStep, record: StepRecord) -> None:
        """Call the script's function. An error of it must not change what the step has decided."""
        if not record.committed:
            self._discarded += 1
            return
        discarded, self._discarded = self._discarded, 0
        try:
            on_step(scalars_of(record, discarded), record.step)
        except Exception:
            if self._callback_errors.allows(time.monotonic()):
                log.exception("on_step failed; training goes on", step=record.step)

    def close(self) -> None:
        """Send the records that are left, within ``exporting.GOODBYE_SECONDS``."""
        if self._export is not None:
            self._export.close(exporting.GOODBYE_SECONDS)
        if self._sender is None:
            return
        self._running.cancel()
        with contextlib.suppress(TimeoutError, KeepstepError, OSError, RuntimeError, concurrent.futures.CancelledError):
            self._loop_thread.call(self._flush(self._sender), 2 * exporting.GOODBYE_SECONDS)

    @staticmethod
    async def _flush(sender: Sender) -> None:
        await asyncio.sleep(0)  # lets the cancelled batch end; the service counts a record that comes twice once
        await sender.flush(exporting.GOODBYE_SECONDS)
