"""The collectives of one try of a step: start each when the quorum has formed, then wait for them and for the device.

Errors are reported, not raised. After an error no further collective of the try starts.

This group looks for a NaN or an infinity in what it contributes to a sum or an average. The pass over the memory that
scales a contribution to an average finds it at no cost. Elsewhere the extremes show it: 0.2 to 0.6 ms of one core for
two million float32. With ``refuse_nonfinite`` those of each result are computed too. Results are equal in all groups,
so all groups refuse together.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from keepstep.collectives.all_reduce import all_reduce
from keepstep.collectives.codecs.codec import Round
from keepstep.group.quorum_plan import Participation, QuorumPlan
from keepstep.process_group.works import writing
from keepstep.step.context import StepContext
from keepstep.step.reducing.neutral_elements import neutral_element
from keepstep.step.reduction import ManagedWork, Reduction
from keepstep.step.reporting.step_telemetry import StepTimes
from keepstep.step.retrying.kept_reductions import KeptReduction
from keepstep_mesh.errors import KeepstepError
from keepstep_mesh.protocol.membership import StepReport
from keepstep_mesh.protocol.records import maker
from keepstep_mesh.telemetry.tracing.spans import ALL_REDUCE

SCALED_BEFORE = (torch.float16, torch.float32)
"""Dtypes of contributions to an average that are scaled before the sum, as in torch's DDP."""
_make_report = maker(StepReport)


class Errors(Protocol):
    """Takes the errors of collectives, from any thread."""

    @property
    def error(self) -> Exception | None:
        """The first one."""

    def report(self, error: Exception) -> None:
        """Report an error of this group."""

    def report_of_peers(self, error: Exception) -> None:
        """Report an error that came from the other groups, or from the connections to them."""


class Collectives:
    """Collectives that were started and must end before the vote.

    Args:
        context: of this process.
        times: when the last collective began is written here.
        errors: gets the errors.
        wait_participation: waits for the quorum, and returns that of this group in the step. None: nothing is reduced.
    """

    def __init__(
        self,
        context: StepContext,
        times: StepTimes,
        errors: Errors,
        wait_participation: Callable[[], Participation | None],
    ) -> None:
        self._context = context
        self._times = times
        self._errors = errors
        self._wait_participation = wait_participation
        self._participation: Participation | None = None
        """Known once the first collective was started."""
        self._works: list[ManagedWork] = []
        self._contributed: list[torch.Tensor] = []
        """The smallest and the largest element of each contribution to a sum or an average."""
        self._spoiled: list[torch.Tensor] = []
        """For each contribution that was scaled: 1 if it had a NaN or an infinity, else 0."""
        self._results: list[torch.Tensor] = []
        """Those of each result, with ``refuse_nonfinite``."""
        self.launched = 0.0
        """``time.monotonic()`` when the first collective began."""
        self.quantized = 0
        """Number of collectives that sent encoded values."""
        self.write_back_failed = False
        """Whether a result could not be written back."""
        self.nonfinite = False
        """Whether this group contributed a NaN or an infinity; known after ``check_finite``."""

    @property
    def started(self) -> int:
        """Number of collectives that were started."""
        return len(self._works)

    def in_flight(self) -> str:
        """Return the first collective that has begun and not ended, as a phrase; empty: all have ended. Any thread."""
        works = [*self._works]
        for number, work in enumerate(works, 1):
            if not work.is_over:
                seconds = time.monotonic() - self.launched
                return f"all-reduce {number} of {len(works)}; the first began {seconds:.0f} s ago"
        return ""

    def allreduce(self, reduction: Reduction, kept: KeptReduction | None = None) -> ManagedWork:
        """Start to reduce a tensor in place over the groups that take part.

        ``agreement.ARITHMETIC`` is the version of this arithmetic. A group that does not take part contributes the
        neutral element of the operation, such as 0 to a sum. float16, whose sum would overflow, and float32 are divided
        before the sum, as in torch's DDP; other floats are divided after it. A sum of booleans is a logical or, as with
        NCCL.

        Args:
            reduction: the tensor, and how to reduce it.
            kept: copies the tensor, for a retry; None: the step is not retried.
        """
        not_started = None if kept is None else kept.ended  # it may have been filled before the start failed
        return self._start(reduction.tensor, self._reduce, reduction, kept, not_started=not_started)

    def run(self, tensors: list[torch.Tensor], start: Callable[[Round], dist.Work]) -> ManagedWork:
        """Start an average of float tensors that ``start`` computes.

        Args:
            tensors: averaged in place.
            start: starts the average and returns its work. If the group does not contribute, it must send zeros.
        """
        return self._start(tensors, self._average, tensors, start)

    def _start(
        self,
        value: object,
        start: Callable[..., ManagedWork],
        *arguments: object,
        not_started: Callable[[], None] | None = None,
    ) -> ManagedWork:
        """Call ``start`` with whether this group contributes, the number of groups that take part, and ``arguments``.

        ``value``: of the future, if nothing is started; ``not_started`` is called then.
        """
        errors = self._errors
        try:
            if self._participation is None and errors.error is None:
                self._participation = self._wait_participation()
            if self._participation is not None and errors.error is None:
                rank, world = self._participation
                return start(rank is not None, world, *arguments)
        except SystemExit as error:  # should_commit raises it again: a backward pass must not be left by an exit
            errors.report(KeepstepError(f"leaving: {error}"))
        except (KeepstepError, OSError, dist.DistError) as error:
            errors.report_of_peers(error)
        except Exception as error:  # noqa: BLE001  reported: the step does not commit, training goes on
            errors.report(error)  # before anything was sent
        if not_started is not None:
            not_started()
        return ManagedWork(None, value, ok=False)

    def _reduce(self, contributes: bool, world: int, reduction: Reduction, kept: KeptReduction | None) -> ManagedWork:
        context, tensor, average = self._context, reduction.tensor, reduction.average
        if kept is not None:
            kept.save()
        if not contributes:
            tensor.fill_(neutral_element(reduction.op, tensor.dtype))
        whole = tensor.contiguous()  # a process group reads the memory behind the first element
        summed = (whole.is_floating_point() or whole.is_complex()) and reduction.op in (ReduceOp.AVG, ReduceOp.SUM)
        scale = 1 / world if average and world > 1 else None  # as torch's DDP: three times as fast as a division
        if summed and contributes:
            self._spoil(whole)
        if scale is not None and whole.dtype in SCALED_BEFORE and not reduction.quantize:
            if contributes:
                self._scale(whole, scale)
            scale = None
        elif summed and contributes:
            self._contributed += _extremes(whole)
        if reduction.quantize:
            self._launching()
            reduced = all_reduce([whole], scale or 1.0, context.reconfigurer.pg, context.timeout)
            self.quantized += 1
            return self._add(reduced, [whole], tensor, summed=summed, write_back=reduction.write_back, kept=kept)
        options = dist.AllreduceOptions()
        wired = ReduceOp.SUM if average else reduction.op
        if whole.dtype is torch.bool and wired == ReduceOp.SUM:
            wired = ReduceOp.MAX  # a backend adds bytes: two Trues would be no boolean, 256 of them False
        options.reduceOp = wired  # type: ignore[assignment]
        options.timeout = context.timeout
        self._launching()
        work = context.reconfigurer.pg.allreduce([whole], options)
        return self._add(work, [whole], tensor, summed=summed, scale=scale, write_back=reduction.write_back, kept=kept)

    def _average(
        self, contributes: bool, world: int, tensors: list[torch.Tensor], start: Callable[[Round], dist.Work]
    ) -> ManagedWork:
        context = self._context
        if contributes:
            for tensor in tensors:
                self._spoil(tensor)
                self._contributed += _extremes(tensor)
        self._launching()
        work = start(Round(context.reconfigurer.pg, contributes, world, context.timeout))
        self.quantized += 1
        return self._add(work, tensors, tensors, summed=True)

    def _scale(self, tensor: torch.Tensor, scale: float) -> None:
        """Multiply a contribution by ``scale``, and look for a NaN or an infinity in the same pass over the memory."""
        device = tensor.device
        found, factor = torch.zeros(1, device=device), torch.full((1,), scale, device=device)
        with torch.no_grad(), writing([tensor]):
            torch._amp_foreach_non_finite_check_and_unscale_([tensor.detach()], found, factor)
        self._spoiled.append(found)

    def _spoil(self, tensor: torch.Tensor) -> None:
        """Let `keepstep chaos` spoil a contribution."""
        if self._context.faults is not None:
            self._context.faults.spoil(tensor)

    def _launching(self) -> None:
        self._times.launched = now = time.monotonic()
        if not self._works:
            self.launched = now

    def _add(
        self,
        work: dist.Work,
        results: list[torch.Tensor],
        value: torch.Tensor | list[torch.Tensor],
        *,
        summed: bool,
        scale: float | None = None,
        write_back: Callable[[], None] | None = None,
        kept: KeptReduction | None = None,
    ) -> ManagedWork:
        """Note a collective that was started. ``value``: of its future; a tensor gets the result if it is another."""

        def finish() -> None:
            with writing([*results, value] if isinstance(value, torch.Tensor) else results):
                for result in results:
                    if scale is not None:
                        result.mul_(scale)
                    if summed and self._context.refuse_nonfinite:
                        self._results.extend(_extremes(result))
                if isinstance(value, torch.Tensor) and results[0] is not value:
                    value.copy_(results[0])

        managed = ManagedWork(
            work, value, finish, self._errors.report_of_peers, write_back, ended=kept.ended if kept else None
        )
        self._works.append(managed)
        return managed

    # ---- the end

    def finish(self, *, all_or_none: bool = False) -> None:
        """Wait for all collectives, and write the results of those that succeeded back.

        Args:
            all_or_none: write nothing back if one of them failed, because all of them may be repeated.
        """
        succeeded = [work for work in self._works if work.ended()]
        if all_or_none and len(succeeded) < len(self._works):
            return
        for work in succeeded:
            if work.write_back is not None:
                try:
                    work.write_back()
                except Exception as error:  # noqa: BLE001  the tensors that it wrote are equal in no other group
                    self.write_back_failed = True
                    self._errors.report(error)

    def succeeded(self) -> bool:
        """Wait for all collectives, ignore their results, and return whether they succeeded."""
        return not [work for work in self._works if not work.ended()]

    def check_process_group(self) -> None:
        """Report an error that the process group knows of and its works do not carry."""
        pg = self._context.reconfigurer.pg
        if self._works and not getattr(pg, "works_report_all_errors", False):
            errored: Callable[[], Exception | None] | None = getattr(pg, "errored", None)  # not in torch's own
            broken = None if errored is None else errored()
            if broken is not None:
                self._errors.report_of_peers(broken)

    def end(self) -> None:
        """Wait for all collectives and for the device, before the vote."""
        self.finish(all_or_none=self._context.kept is not None)
        if self._errors.error is None:
            self.check_process_group()
        if self._context.reconfigurer.device is not None:
            torch.accelerator.current_stream().synchronize()
        if self._times.trace is not None and self._works:
            facts = {"collectives": self.started, "quantized": self.quantized}
            self._times.trace.present.phase(ALL_REDUCE, self.launched, time.monotonic(), self._errors.error, **facts)

    def check_finite(self, plan: QuorumPlan, *, may_overflow: bool) -> str:
        """Note whether this group contributed a NaN or an infinity. Waits for the device.

        Returns:
            Why no group must commit the results: one has a NaN or an infinity, which ``refuse_nonfinite`` refuses. Else
            an empty string.
        """
        context = self._context
        own = _any_nonfinite(self._contributed) or any(one.item() for one in self._spoiled)
        own = own and not may_overflow
        before = context.asks.last_step is not None and context.asks.last_step.nonfinite
        self.nonfinite = own
        if own and not before:  # else every step of a model that is NaN would log it
            context.log.warning("this group contributed a NaN or an infinity", step=plan.max_step)
        if self._errors.error is not None or not _any_nonfinite(self._results):
            return ""
        who = "this group" if own else "another group, which the event nonfinite of the job names,"
        return f"the average has a NaN or an infinity: {who} contributed it"

    def report(self, plan: QuorumPlan, *, committed: bool) -> StepReport:
        """Return the report of this try for the lighthouse."""
        facts = (plan.quorum_id, plan.max_step, committed, self.started, self.nonfinite)
        return _make_report(*facts, quantized=self.quantized)


def _extremes(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the smallest and the largest element, or two NaNs if one of the elements is a NaN."""
    if not tensor.numel():
        return ()
    values = tensor.detach()
    return tuple(torch.aminmax(torch.view_as_real(values) if values.is_complex() else values))


def _any_nonfinite(values: list[torch.Tensor]) -> bool:
    return not all(math.isfinite(one.item()) for one in values)
