"""A collective that fails before it starts leaves its tensor so that it can be repeated."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import ReduceOp

from keepstep.process_group.torch_backends.gloo import ProcessGroupGloo
from keepstep.step.reducing.collectives import Collectives
from keepstep.step.reduction import Reduction
from keepstep.step.reporting.step_telemetry import StepTimes
from keepstep.step.retrying.kept_reductions import KeptReduction


class Reported:
    """Errors of collectives."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []

    @property
    def error(self) -> Exception | None:
        return next(iter(self.errors), None)

    def report(self, error: Exception) -> None:
        self.errors.append(error)

    report_of_peers = report


def test_a_gradient_of_a_group_without_a_part_is_unchanged_if_its_all_reduce_does_not_start() -> None:
    """The group fills it with zeros, and then its process group says that it failed in the bucket before."""
    context: Any = SimpleNamespace(
        reconfigurer=SimpleNamespace(pg=ProcessGroupGloo()), timeout=timedelta(seconds=1), faults=None
    )
    reported, gradient = Reported(), torch.arange(3.0)
    reduction = Reduction(gradient, ReduceOp.SUM, average=True)
    kept = KeptReduction(reduction, [None], 0)
    assert not Collectives(context, StepTimes(0.0), reported, lambda: (None, 2)).allreduce(reduction, kept).wait()
    assert "cannot run allreduce" in str(reported.error)
    assert gradient.tolist() == [0.0, 0.0, 0.0]
    assert kept.obstacle(frozenset({gradient.untyped_storage().data_ptr()})) == ""
    kept.restore()
    assert gradient.tolist() == [0.0, 1.0, 2.0]
