"""Exchange live state under one quorum: hand it out to groups that heal, or take it in from another group.

A group that cannot hand out its state refuses its joiners at once, so that they do not wait for their timeout. A heal
that takes longer than ``heal_seconds`` is given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta

from keepstep.group.group_peers import checkpoint_metadata
from keepstep.group.quorum_plan import QuorumPlan
from keepstep.runtime.loop_thread import CALL_MARGIN_SECONDS
from keepstep.state.errors import StatesMissing, TransferError, TransferTimeout, UnsupportedValue
from keepstep.step.context import StepContext
from keepstep.step.reporting.heal_meter import REPORT_SECONDS, HealMeter, log_fields
from keepstep.step.reporting.step_telemetry import StepTimes
from keepstep.transfer.exchange import Exchange
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.protocol.policy import heal_limit
from keepstep_mesh.telemetry.tracing.spans import HEAL

GIVE_UP_SECONDS = 1.0
"""A heal runs this much longer than the lighthouse waits for it, so that the lighthouse sees a late heal, not a broken
one.
"""


def heal_seconds(context: StepContext, plan: QuorumPlan) -> float | None:
    """Return how long a heal in the quorum may take; None: no limit but the timeout without progress."""
    if not plan.heal_timeout_ms:
        return None
    return heal_limit(plan.heal_timeout_ms / 1000, context.heals.late) + GIVE_UP_SECONDS


class StateExchange:
    """This group's part in a quorum in which groups heal. Each direction is tried once.

    Args:
        context: of this process.
        plan: of the quorum.
        times: the seconds of a heal are added here.
        together: whether all groups wait until the heals of this quorum have ended.
    """

    def __init__(self, context: StepContext, plan: QuorumPlan, times: StepTimes, *, together: bool) -> None:
        self.healed = False
        """Whether this group has taken over the reference state."""
        self._context = context
        self._plan = plan
        self._times = times
        self._together = together
        self._answered_joiners = False
        """Whether the state was handed out, or the joiners were refused."""
        self._tried = False

    def run(self) -> Exception | None:
        """Hand out live state to the groups that heal from this one; heal, if this group is behind.

        Returns:
            The error that broke this group's heal; None when it healed or did not have to.
        """
        plan = self._plan
        self._context.transport.prepare(self.parties())
        if self.hands_out and not self._answered_joiners:
            self._answered_joiners = True
            self._hand_out()
        if plan.source is not None and not self._tried:
            self._tried = True
            return self._heal_from(plan.source)
        return None

    def _heal_from(self, source: int) -> Exception | None:
        """Heal, and return the error that broke the heal."""
        began, received, failure = time.monotonic(), 0, ""
        try:
            with self._measured(source) as meter:
                try:
                    self._heal(source, meter)
                finally:
                    received = meter.bytes_done
            self.healed = True
        except Exception as error:  # noqa: BLE001  whatever broke it, this step does not commit here
            failure = f"{type(error).__name__}: {error}"
            return error  # and no variable keeps it: its traceback has this frame
        finally:
            ended = time.monotonic()
            self._times.heal_seconds += ended - began
            if self._times.trace is not None:
                name, via = self._plan.members[source].replica_id, self._via
                self._times.trace.present.phase(HEAL, began, ended, failure, source=name, via=via, bytes=received)
        return None

    @property
    def hands_out(self) -> bool:
        """Whether this group hands out its state to groups that heal."""
        plan = self._plan
        return bool(plan.destinations or (self._context.transport.needs_all_sources and not plan.behind))

    def parties(self) -> Exchange:
        """Return the groups that have, and that need, the live state."""
        settings, plan, ids = self._context.settings, self._plan, self._plan.replica_ids
        return Exchange(
            job=settings.job,
            epoch=plan.epoch,
            quorum_id=plan.quorum_id,
            step=plan.max_step,
            replica_id=ids[plan.replica_rank],
            rank=settings.rank,
            world_size=settings.world_size,
            sources=tuple(ids[rank] for rank in plan.cohort),
            joiners=tuple(ids[rank] for rank in plan.healing),
            beside=tuple(ids[rank] for rank in plan.beside),
            together=self._together,
        )

    # ---- as a source

    def _hand_out(self) -> None:
        context, plan = self._context, self._plan
        try:
            context.state.stage(context.transport, list(plan.destinations), plan.max_step, context.timeout)
        except Exception as error:  # noqa: BLE001  only the joiners miss the state
            reason = f"{type(error).__name__}: {error}"
            context.log.error("live state not handed out; its joiners are refused", step=plan.max_step, reason=reason)
            self._refuse(reason, lasting=isinstance(error, UnsupportedValue))

    def refuse(self, reason: str) -> None:
        """Tell the joiners that this group does not hand out its state in this step, unless it already has."""
        if self._plan.destinations and not self._answered_joiners:
            self._answered_joiners = True
            self._refuse(reason)

    def _refuse(self, reason: str, *, lasting: bool = False) -> None:
        context, plan = self._context, self._plan
        options = {"lasting": True} if lasting and context.transport.accepts_into else {}  # others may not know it
        try:
            context.transport.refuse_checkpoint(
                list(plan.destinations), plan.max_step, f"{context.link.replica_id}: {reason}", **options
            )
        except Exception as error:  # noqa: BLE001  the joiners then wait for their own timeout
            context.log.warning("joiners not refused", reason=f"{type(error).__name__}: {error}")

    # ---- as a joiner

    @contextlib.contextmanager
    def _measured(self, source: int) -> Iterator[HealMeter]:
        """Report the progress and the end of a heal to the lighthouse, and of a long one to the log."""
        context = self._context
        meter = HealMeter(self._plan.max_step, self._plan.members[source].replica_id, time.monotonic())
        reporting, error = context.loop_thread.spawn(self._report_progress(meter)), ""
        try:
            yield meter
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"
            raise
        finally:
            if not reporting.cancel():
                context.log.error("progress of a heal not reported", exc_info=reporting.exception())
            last = meter.last_report(self._via, error, time.monotonic())
            context.loop_thread.loop.call_soon_threadsafe(context.link.healing, last)

    async def _report_progress(self, meter: HealMeter) -> None:
        while True:
            await asyncio.sleep(REPORT_SECONDS)
            report = meter.report(self._via, time.monotonic())
            self._context.link.healing(report)
            if (event := meter.line(report)) is not None:
                self._context.log.info(event, **log_fields(report))

    @property
    def _via(self) -> str:
        return getattr(self._context.transport, "via", "")

    def _heal(self, source: int, meter: HealMeter) -> None:
        """Load the state of ``source`` as it was at ``max_step``."""
        context, plan, progress = self._context, self._plan, self._context.progress
        started, seconds = time.monotonic(), context.timeout.total_seconds()
        member, settings = plan.members[source], context.settings
        if progress.step > plan.max_step:
            given_up = {"step": progress.step, "lineage": progress.lineage}
            context.log.warning("goes back", to_step=plan.max_step, to_lineage=plan.lineage, **given_up)
        request = checkpoint_metadata(member.info.address, settings.rank, settings.token, seconds)
        try:
            metadata = context.loop_thread.call(request, seconds + CALL_MARGIN_SECONDS)
        except (KeepstepError, TimeoutError) as error:
            raise KeepstepError(f"{member.replica_id}: {error}") from error

        try:
            self._receive(source, metadata, meter)
            if progress.step != plan.max_step:
                raise KeepstepError(f"{member.replica_id} sent step {progress.step} instead of step {plan.max_step}")
        except BaseException as error:
            if not isinstance(error, TransferError) or error.torn:
                context.tear(plan.max_step if isinstance(error, StatesMissing) else 0)
            raise
        progress.lineage = plan.lineage
        took, received = time.monotonic() - started, meter.bytes_done
        facts = {"source": member.replica_id, "via": self._via, "bytes": received, "seconds": round(took, 3)}
        context.log.info("healed", step=progress.step, **facts)
        context.steps.write(
            *("healed", progress.step, plan.quorum_id),
            epoch=plan.epoch,
            lineage=plan.lineage,
            seconds=took,
            bytes=received,
            source=member.replica_id,
        )

    def _receive(self, source: int, metadata: str, meter: HealMeter) -> None:
        context, seconds = self._context, heal_seconds(self._context, self._plan)
        limit = None if seconds is None else timedelta(seconds=seconds)
        try:
            context.state.receive(
                context.transport, source, metadata, self._plan.max_step, context.timeout, meter.moved, limit
            )
        except TransferTimeout:
            context.heals.late += 1
            raise
        context.heals.late = context.heals.unfit = 0
