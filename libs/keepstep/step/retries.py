"""The same step again after a loss, with ``retry_allreduce``.

A try that failed because of other groups is followed by another one, under a quorum of the groups that are left, with
the same gradients. ``retrying/retry_rules`` decides.

A try is repeated before the script sees a result of it: at the end of a backward pass, and in a group of one rank also
when the script waits for an all-reduce. All other tries are repeated in ``conclude``.
"""

from __future__ import annotations

from datetime import timedelta
from typing import NamedTuple, Protocol

from keepstep.group.quorum_plan import QuorumPlan
from keepstep.step.context import StepContext
from keepstep.step.first_error import FirstError
from keepstep.step.reducing.collectives import Collectives
from keepstep.step.reduction import ManagedWork, Reduction
from keepstep.step.reporting.step_telemetry import StepTimes
from keepstep.step.retrying import retry_rules
from keepstep.step.retrying.kept_reductions import HANDED_OUT, KeptReductions, at_end_of_backward
from keepstep.step.retrying.retry_rules import FailedTry
from keepstep.step.step_quorum import StepQuorum
from keepstep_mesh.errors import KeepstepError, SessionClosed
from keepstep_mesh.protocol.group_messages import RankAsk
from keepstep_mesh.protocol.membership import UNKNOWN

NOT_REDUCED = (
    "another rank of this group failed, or did not end as many backward passes as this one, which retry_allreduce needs"
)

NO_PIPELINE = (
    "; with retry_allreduce the ranks of a group wait for each other at the end of a backward pass that reduces: use "
    "retry_allreduce=False for stages of a pipeline, and for ranks with different numbers of backward passes"
)

TOO_LATE = "other groups have committed this step, so it cannot be retried"


class Taken(NamedTuple):
    """The result of one try."""

    committed: bool
    unhealed: Exception | None = None
    """Error that broke the heal of this group."""


class RetriedStep(Protocol):
    """The step that is tried again. ``Attempt`` implements it."""

    present: Collectives
    """Collectives of the present try."""

    def take(self, limit: timedelta) -> Taken:
        """Take the step under its present quorum, and vote within ``limit``."""

    def report_try(self, plan: QuorumPlan, *, committed: bool) -> None:
        """Report the present try to the lighthouse, with the next request."""

    def begin_again(self) -> RankAsk:
        """Begin another try, and return its request."""


class Retries:
    """The retries of one step.

    Args:
        context: of this process.
        kept: the all-reduces of the step.
        quorum: of the step; each retry requests it again.
        errors: of the step; each retry forgets them.
        times: of the step.
        step: is tried again.
    """

    def __init__(
        self,
        context: StepContext,
        kept: KeptReductions,
        quorum: StepQuorum,
        errors: FirstError,
        times: StepTimes,
        step: RetriedStep,
    ) -> None:
        self.number = 0
        """Number of retries so far."""
        self._context = context
        self._kept = kept
        self._quorum = quorum
        self._errors = errors
        self._times = times
        self._step = step
        self._failed: Taken | None = None
        """Result of the last try, if ``finalize`` ended it: the step will not commit."""
        self._agreed = 0
        """Number of all-reduces that the ranks of this group agreed on: all of them succeeded."""
        kept.begin()

    def allreduce(self, reduction: Reduction) -> ManagedWork:
        """Start an all-reduce in the present try. See ``Collectives.allreduce``."""
        work = self._step.present.allreduce(reduction, self._kept.note(reduction))
        if not at_end_of_backward(self.finalize):
            work.finalize = self.finalize if self._context.ranks.alone else self._hand_out
        return work

    def conclude(self, limit: timedelta) -> Taken:
        """Take the step, again as often as ``retry_rules`` allow. ``limit``: of the vote of each try."""
        taken = self._failed or self._step.take(limit)
        with self._times.retrying():
            while not (taken.committed or self._errors.ended or self._failed) and self.goes_again():
                self._retry()
                taken = self._step.take(limit)
        return taken

    # ---- before the script sees a result

    def finalize(self) -> bool:
        """Repeat the all-reduces so far until they succeed in all ranks. Return whether the step may commit so far."""
        if self._errors.ended or self._failed is not None:
            return False
        try:
            if not self._all_succeeded():
                with self._times.retrying():
                    while self._failed is None:
                        failed = self._step.take(self._context.timeout)
                        if self._errors.ended or not self.goes_again():
                            self._failed = failed
                            break
                        self._retry()
                        if self._all_succeeded():
                            break
            self._kept.refuse(HANDED_OUT)
        except SystemExit as error:  # should_commit raises it again: a backward pass must not be left by an exit
            self._quorum.report(KeepstepError(f"leaving: {error}"))
        except Exception as error:  # noqa: BLE001  reported: the step does not commit, training goes on
            self._quorum.report(error)
        return self._errors.error is None

    def _all_succeeded(self) -> bool:
        """Wait for the all-reduces so far, and return whether those of all ranks of this group succeeded.

        The ranks agree once in each backward pass that reduces. So all of them must end equally many of these.
        """
        started = self._step.present.started
        if started == self._agreed and self._errors.error is None:
            return True
        succeeded = self._step.present.succeeded() and self._errors.error is None
        if not self._context.ranks.all_ready(succeeded, advice=NO_PIPELINE):
            if succeeded:
                self._errors.outvoted(NOT_REDUCED)
            return False
        self._agreed = started
        return True

    def _hand_out(self) -> bool:
        """Wait for the all-reduces so far, whose results the script gets. The ranks agree in backward passes only."""
        if not self._errors.ended:
            self._kept.refuse(HANDED_OUT)
        return self._step.present.succeeded() and self._errors.error is None

    # ---- the same step again

    def goes_again(self) -> bool:
        """Return whether all ranks of this group take the step that failed again. Each rank calls it after a vote."""
        context, plan = self._context, self._quorum.plan
        if plan is None:
            return False
        own = self._errors.own or self._step.present.write_back_failed
        behind = plan.behind and not plan.follows  # a group that follows contributes zeros, of any weights
        failed = FailedTry(self.number, own, behind, context.fatal is not None, self._kept.obstacle())
        step, why_not = plan.max_step, retry_rules.obstacle(failed)
        context.ranks.ended(plan.attempt)  # the poll follows the vote on this try
        ready = context.ranks.all_ready(not why_not)
        if why_not:
            context.log.warning("step not retried", step=step, reason=why_not)
        elif not ready:
            context.log.warning("step not retried", step=step, reason="another rank of this group cannot")
        return ready

    def _retry(self) -> None:
        """Request a quorum of the same step, and start its all-reduces again with the gradients of this group."""
        context = self._context
        if (failed := self._quorum.plan) is not None:
            self._step.report_try(failed, committed=False)
            reason = str(self._errors.error)
            context.log.info("retrying the step", step=failed.max_step, reason=reason)
            context.steps.write("retried", context.progress.step, failed.quorum_id, epoch=failed.epoch, reason=reason)
            context.telemetry.state("retrying")
            if self._times.trace is not None:
                self._times.trace.failed(self._errors.error)
        context.link.finished_step()
        self.number += 1
        ask = self._step.begin_again()
        self._errors.retry()
        self._quorum.request(ask)
        try:
            self._quorum.heal(ask)
            plan = self._quorum.wait()
        except SessionClosed:
            raise
        except Exception as error:  # noqa: BLE001  reported, unless it ends the process
            context.raise_fatal()
            self._quorum.report(error)
            return
        if plan.behind and not plan.follows:
            self._errors.report(KeepstepError(TOO_LATE), cause=UNKNOWN)
        if not plan.finishing:
            for kept in self._kept.again():
                kept.restore()
                self._step.present.allreduce(kept.reduction, kept)
