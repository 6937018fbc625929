"""The collectives of one attempt: start them, then wait for them and for the device.

The extremes of what this group contributes to a sum or an average show whether it has a NaN or an infinity: 0.2 ms of
one core for two million float32. With ``refuse_nonfinite`` those of each result are computed too. Results are equal in
all groups, so all groups refuse together.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from keepstep.collectives.all_reduce import all_reduce
from keepstep.collectives.codecs.codec import Round
from keepstep.process_group.works import writing
from keepstep.step.context import StepContext
from keepstep.step.reducing.managed_work import ManagedWork
from keepstep.step.reducing.neutral_elements import neutral_element
from keepstep.step.reduction import Reduction
from keepstep.step.reporting.step_telemetry import StepTimes
from keepstep.step.retrying.kept_reductions import KeptReduction


class Collectives:
    """Collectives that were started and must end before the vote.

    Args:
        context: of this process.
        times: when the last collective began is written here.
        report: called with the error of a collective that failed.
        report_own: called with an error of this group alone; None: ``report`` is.
    """

    def __init__(
        self,
        context: StepContext,
        times: StepTimes,
        report: Callable[[Exception], None],
        report_own: Callable[[Exception], None] | None = None,
    ) -> None:
        self._context = context
        self._times = times
        self._report = report
        self._report_own = report_own or report
        self._works: list[ManagedWork] = []
        self._contributed: list[torch.Tensor] = []
        """The smallest and the largest element of each contribution to a sum or an average."""
        self._results: list[torch.Tensor] = []
        """Those of each result, with ``refuse_nonfinite``."""
        self.launched = 0.0
        """``time.monotonic()`` when the first collective began."""
        self.quantized = 0
        """Number of collectives that sent encoded values."""
        self.write_back_failed = False
        """Whether a result could not be written back."""

    @property
    def started(self) -> int:
        """Number of collectives that were started."""
        return len(self._works)

    @property
    def contributed_nonfinite(self) -> bool:
        """Whether this group contributed a NaN or an infinity. Waits for the device."""
        return _any_nonfinite(self._contributed)

    @property
    def received_nonfinite(self) -> bool:
        """Whether a result has one, after ``finish``; False without ``refuse_nonfinite``."""
        return _any_nonfinite(self._results)

    def allreduce(
        self, reduction: Reduction, *, contributes: bool, world: int, kept: KeptReduction | None = None
    ) -> ManagedWork:
        """Start to reduce a tensor in place.

        ``agreement.ARITHMETIC`` is the version of this arithmetic. float16 is divided before the sum, which would
        overflow, as in torch's DDP; other floats are divided after it. A sum of booleans is a logical or, as with NCCL.

        Args:
            reduction: the tensor, and how to reduce it.
            contributes: False: this group contributes the neutral element of the operation, such as 0 to a sum.
            world: number of groups that take part.
            kept: copies the tensor, for a retry; None: the step is not retried.

        Raises:
            ValueError: the operation has no neutral element.
            Exception: the collective could not be started.
        """
        context, tensor, average = self._context, reduction.tensor, reduction.average
        if kept is not None:
            kept.save()
        if not contributes:
            tensor.fill_(neutral_element(reduction.op, tensor.dtype))
        whole = tensor.contiguous()  # a process group reads the memory behind the first element
        summed = (whole.is_floating_point() or whole.is_complex()) and reduction.op in (ReduceOp.AVG, ReduceOp.SUM)
        if summed and contributes:
            self._spoil(whole)
            self._contributed += _extremes(whole)
        scale = 1 / world if average and world > 1 else None  # as torch's DDP: three times as fast as a division
        if reduction.quantize:
            self._launching()
            reduced = all_reduce([whole], scale or 1.0, context.reconfigurer.pg, context.timeout)
            self.quantized += 1
            return self._add(reduced, [whole], tensor, summed=summed, write_back=reduction.write_back, kept=kept)
        if scale is not None and whole.dtype is torch.float16:
            with writing([whole]):
                whole.mul_(scale)
            scale = None
        options = dist.AllreduceOptions()
        wired = ReduceOp.SUM if average else reduction.op
        if whole.dtype is torch.bool and wired == ReduceOp.SUM:
            wired = ReduceOp.MAX  # a backend adds bytes: two Trues would be no boolean, 256 of them False
        options.reduceOp = wired  # type: ignore[assignment]
        options.timeout = context.timeout
        self._launching()
        work = context.reconfigurer.pg.allreduce([whole], options)
        return self._add(work, [whole], tensor, summed=summed, scale=scale, write_back=reduction.write_back, kept=kept)

    def run(
        self, tensors: list[torch.Tensor], start: Callable[[Round], dist.Work], *, contributes: bool, world: int
    ) -> ManagedWork:
        """Start an average of float tensors that ``start`` computes.

        Args:
            tensors: averaged in place.
            start: starts the average and returns its work. If the group does not contribute, it must send zeros.
            contributes: as in ``allreduce``.
            world: as in ``allreduce``.

        Raises:
            Exception: the average could not be started.
        """
        context = self._context
        if contributes:
            for tensor in tensors:
                self._spoil(tensor)
                self._contributed += _extremes(tensor)
        self._launching()
        work = start(Round(context.reconfigurer.pg, contributes, world, context.timeout))
        self.quantized += 1
        return self._add(work, tensors, tensors, summed=True)

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

        managed = ManagedWork(work, value, finish, self._report, write_back, ended=kept.ended if kept else None)
        self._works.append(managed)
        return managed

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
                    self._report_own(error)

    def succeeded(self) -> bool:
        """Wait for all collectives, and return whether they succeeded."""
        return not [work for work in self._works if not work.ended()]

    def check_process_group(self) -> None:
        """Report an error that the process group knows of and its works do not carry."""
        pg = self._context.reconfigurer.pg
        if self._works and not getattr(pg, "works_report_all_errors", False):
            errored: Callable[[], Exception | None] | None = getattr(pg, "errored", None)  # not in torch's own
            broken = None if errored is None else errored()
            if broken is not None:
                self._report(broken)

    def synchronize_device(self) -> None:
        """Wait for the current CUDA stream, if this process uses CUDA."""
        if self._context.reconfigurer.device is not None:
            torch.cuda.current_stream().synchronize()

    def drain(self) -> None:
        """Wait for all collectives and ignore their results."""
        self.succeeded()


def _extremes(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the smallest and the largest element, or two NaNs if one of the elements is a NaN."""
    if not tensor.numel():
        return ()
    values = tensor.detach()
    return tuple(torch.aminmax(torch.view_as_real(values) if values.is_complex() else values))


def _any_nonfinite(values: list[torch.Tensor]) -> bool:
    return not all(math.isfinite(one.item()) for one in values)
