"""The collectives of a step: start each when the quorum has formed, and all of them again in a retry.

Errors are reported, not raised. After an error no further collective of the step starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import Work

from keepstep.collectives.codecs.codec import Round
from keepstep.group.quorum_plan import QuorumPlan
from keepstep.step.context import StepContext
from keepstep.step.first_error import FirstError
from keepstep.step.quorums.rounds import Rounds
from keepstep.step.reducing.collectives import Collectives
from keepstep.step.reducing.managed_work import ManagedWork
from keepstep.step.reduction import Reduction
from keepstep.step.reporting.step_telemetry import StepTimes
from keepstep.step.retrying.kept_reductions import KeptReduction
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.protocol.membership import StepReport
from keepstep_mesh.telemetry.tracing.spans import ALL_REDUCE


class StepCollectives:
    """The collectives of one step.

    Args:
        context: of this process.
        rounds: the quorums of the step.
        times: of the step.
        errors: errors of the step are reported here.
    """

    def __init__(self, context: StepContext, rounds: Rounds, times: StepTimes, errors: FirstError) -> None:
        self.nonfinite = False
        """Whether this group contributed a NaN or an infinity; known after ``check_finite``."""
        self._context = context
        self._rounds = rounds
        self._times = times
        self._errors = errors
        self._present = Collectives(context, times, errors.report_of_peers, errors.report)
        """Of the present try."""
        if context.kept is not None:
            context.kept.begin()

    @property
    def started(self) -> int:
        """Number of collectives that were started in the present try."""
        return self._present.started

    @property
    def write_back_failed(self) -> bool:
        """Whether a result could not be written back."""
        return self._present.write_back_failed

    def allreduce(self, reduction: Reduction) -> ManagedWork:
        """Reduce a tensor in place over the groups that take part. See ``Collectives.allreduce``."""
        kept = self._context.kept
        return self._allreduce(reduction, None if kept is None else kept.note(reduction))

    def _allreduce(self, reduction: Reduction, kept: KeptReduction | None) -> ManagedWork:
        def start(contributes: bool, world: int) -> ManagedWork:
            return self._present.allreduce(reduction, contributes=contributes, world=world, kept=kept)

        return self._start(start, reduction.tensor)

    def run(self, tensors: list[torch.Tensor], start: Callable[[Round], Work]) -> ManagedWork:
        """Average ``tensors`` in place with ``start``. See ``Collectives.run``."""
        if self._context.kept is not None:
            self._context.kept.refuse("a codec averaged tensors, and keeps an error of its own")
        return self._start(
            lambda contributes, world: self._present.run(tensors, start, contributes=contributes, world=world),
            tensors,
        )

    def _start(self, start: Callable[[bool, int], ManagedWork], value: object) -> ManagedWork:
        """Call ``start`` with whether this group contributes, and the number of groups that do."""
        errors = self._errors
        try:
            plan = self._rounds.wait() if errors.error is None else None
            if plan is None or errors.error is not None or plan.finishing:
                return ManagedWork(None, value, ok=False)
            rank, world = self._rounds.participation(plan)
            return start(rank is not None, world)
        except SystemExit as error:  # should_commit raises it again: a backward pass must not be left by an exit
            errors.report(KeepstepError(f"leaving: {error}"))
        except (KeepstepError, OSError, dist.DistError) as error:
            errors.report_of_peers(error)
        except Exception as error:  # noqa: BLE001  reported: the step does not commit, training goes on
            errors.report(error)  # before anything was sent
        return ManagedWork(None, value, ok=False)

    def succeeded(self) -> bool:
        """Wait for the collectives of this try, and return whether the step may commit so far."""
        return self._present.succeeded() and self._errors.error is None

    def begin_retry(self) -> None:
        """Begin another try of the step, without a collective."""
        errors = self._errors
        self._present = Collectives(self._context, StepTimes(self._times.began), errors.report_of_peers, errors.report)

    def start_again(self) -> None:
        """Start the all-reduces of the step again, with the gradients of this group."""
        for kept in self._context.kept.again() if self._context.kept is not None else ():
            kept.restore()
            self._allreduce(kept.reduction, kept)

    def finish(self) -> None:
        """Wait for all collectives and for the device."""
        self._errors.abort()  # an error may have been reported while the process group was built: no peer must wait
        self._present.finish(all_or_none=self._context.kept is not None)
        if self._errors.error is None:
            self._present.check_process_group()
        self._present.synchronize_device()
        if self._times.trace is not None and self.started:
            facts = {"collectives": self.started, "quantized": self._present.quantized}
            began, error = self._present.launched, self._errors.error
            self._times.trace.present.phase(ALL_REDUCE, began, time.monotonic(), error, **facts)

    def write_back(self) -> None:
        """Write the results of the collectives back again."""
        self._present.finish()

    def drain(self) -> None:
        """Wait for all collectives and ignore their results."""
        self._present.drain()

    def check_finite(self, plan: QuorumPlan, *, may_overflow: bool) -> None:
        """Note whether this group contributed a NaN or an infinity. Refuse a result with one, if the job does."""
        context, own = self._context, self._present.contributed_nonfinite and not may_overflow
        before = context.last_step is not None and context.last_step.nonfinite
        self.nonfinite = own
        if own and not before:  # else every step of a model that is NaN would log it
            context.log.warning("this group contributed a NaN or an infinity", step=plan.max_step)
        if self._errors.error is None and self._present.received_nonfinite:
            who = "this group" if own else "another group, which the event nonfinite of the job names,"
            self._errors.vote_no(KeepstepError(f"the average has a NaN or an infinity: {who} contributed it"))

    def report(self, plan: QuorumPlan, *, committed: bool) -> StepReport:
        """Return the report of this try for the lighthouse."""
        facts = (plan.quorum_id, plan.max_step, committed, self._present.started, self.nonfinite)
        return StepReport(*facts, quantized=self._present.quantized)
