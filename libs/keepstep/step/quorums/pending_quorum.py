"""A request for a quorum. The event-loop thread sends it; the training thread waits only where it needs the answer."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import time
from collections.abc import Coroutine
from typing import Any, NoReturn

from keepstep.group.agreement import LayoutChanges
from keepstep.group.quorum_plan import QuorumPlan, plan_of_closed_job
from keepstep.group.ranks.merging import DisagreeError
from keepstep.group.ranks.rank_link import Leaving
from keepstep.runtime.exits import (
    CollectivesExit,
    DivergedExit,
    EvictedExit,
    GroupFailedExit,
    JobClosedExit,
    MismatchExit,
    StartRefusedExit,
)
from keepstep.runtime.loop_thread import CALL_MARGIN_SECONDS
from keepstep.step.context import StepContext
from keepstep.step.reporting.step_telemetry import StepTimes
from keepstep_mesh.errors import (
    Banned,
    CollectivesMismatch,
    Drained,
    JobClosed,
    LayoutMismatch,
    ReplicasDiverged,
    SessionClosed,
    StartRefused,
)

MISMATCH_LINGER_SECONDS = 0.5
"""Time that a refused group still serves its parameters, for another refused group that looks for the difference."""
REPORT_WAIT_SECONDS = 0.5
"""After this time the metrics service learns that the group waits for a quorum."""
WITHDRAW_SECONDS = 2.0
"""Limit for the event loop thread to hear that a request is withdrawn."""

HOW_TO_COMPLETE = (
    "; make all models, optimizers and samplers before the first start_quorum(), or as soon as manager.current_step() "
    "is at least the step at which the other groups made them"
)


class PendingQuorum:
    """One request and its answer.

    Args:
        context: of this process.
        coroutine: requests the quorum and rebuilds the process group; runs on the event-loop thread.
        timeout: of the request, in seconds.
    """

    def __init__(self, context: StepContext, coroutine: Coroutine[Any, Any, QuorumPlan], timeout: float) -> None:
        self._context = context
        self._timeout = timeout
        self._changes: LayoutChanges | None = None
        """Raised by every wait, once it was raised."""
        self._future: concurrent.futures.Future[QuorumPlan] = context.loop_thread.spawn(coroutine)

    @property
    def done(self) -> bool:
        """Whether the request has ended, with a quorum or without."""
        return self._future.done()

    @property
    def failed(self) -> bool:
        """Whether the request has ended without a quorum."""
        future = self._future
        return future.done() and (future.cancelled() or future.exception() is not None)

    def withdraw(self) -> None:
        """Cancel the request. When this returns, its coroutine has heard of it."""
        if self._future.cancel():
            ended = (concurrent.futures.CancelledError, RuntimeError)
            with contextlib.suppress(TimeoutError, *ended):  # the loop is busy, ends, or has ended
                self._context.loop_thread.call(asyncio.sleep(0), WITHDRAW_SECONDS)

    def wait(self, times: StepTimes, *, may_resume: bool = False) -> QuorumPlan:
        """Wait for the plan. If the job is closed and a relay has its final state, return a plan that loads it.

        Args:
            times: of the step.
            may_resume: whether this group may have a later state at a relay than the one with which it asked.

        Raises:
            StartRefused: the job does not begin at the state of this group, which ``may_resume``.
            SystemExit: training ends in this process.
            JobClosed: all groups have finished, and this one holds the final state.
            TimeoutError, KeepstepError: the reason why no quorum formed.
        """
        context = self._context
        if self._changes is not None:
            raise self._changes
        asking = (
            2 * self._timeout * (1 + context.settings.quorum_retries)
        )  # first for the group's other ranks, then for other groups
        try:
            return self._result(asking + context.timeout.total_seconds() + CALL_MARGIN_SECONDS, times)
        except CollectivesMismatch as error:
            context.raise_fatal()
            context.end_group(CollectivesExit(str(error)))
        except ReplicasDiverged as error:
            context.end_with(DivergedExit(str(error)))
        except JobClosed as error:
            if error.finished:
                raise
            if context.find_final is None:
                context.end_with(JobClosedExit(str(error)))
            context.find_final(error)
            return plan_of_closed_job(error.step, error.lineage)
        except (Leaving, DisagreeError, LayoutMismatch, StartRefused, Banned) as error:  # Banned is a SessionClosed
            if may_resume and isinstance(error, StartRefused):
                raise
            self._end_training(error)
        except SessionClosed:
            context.raise_fatal()
            raise

    def _result(self, limit: float, times: StepTimes) -> QuorumPlan:
        if self._future.done():
            return self._future.result()
        began = time.monotonic()
        try:
            return self._future.result(REPORT_WAIT_SECONDS)
        except TimeoutError:
            if not self._future.done():
                self._context.telemetry.state("standby" if self._context.stands_by else "waiting_quorum")
            return self._future.result(limit)
        finally:
            waited = time.monotonic() - began
            if self._context.stands_by:
                times.began += waited  # the first step of a spare begins after its wait
            else:
                times.quorum_seconds += waited

    def _end_training(self, error: Leaving | DisagreeError | LayoutMismatch | StartRefused | Banned) -> NoReturn:
        context = self._context
        if isinstance(error, Leaving):
            context.end_with(Drained(str(error)))
        if isinstance(error, Banned):
            context.end_with(EvictedExit(str(error)))
        if isinstance(error, StartRefused):
            context.end_with(StartRefusedExit(str(error)))
        if isinstance(error, DisagreeError):
            context.fail_group(str(error))
            context.end_with(GroupFailedExit(str(error)))
        if not error.peer_address:
            context.end_with(MismatchExit(str(error)))
        lines, difference = context.difference_from(error.peer_address)
        self._changes = context.changed_layout(lines, error.peer_step, f"{error}; {difference}")
        if self._changes is not None:
            raise self._changes
        time.sleep(MISMATCH_LINGER_SECONDS)  # the other group may read the parameters now; nothing tells when it has
        remedy = HOW_TO_COMPLETE if context.layout.missing(lines) else ""
        context.end_with(MismatchExit(f"{error}; {difference}{remedy}"))
