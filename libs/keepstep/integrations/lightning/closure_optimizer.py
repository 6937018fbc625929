"""The optimizer that Lightning's precision plugins step: a closure computes the gradients, and the step may commit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.amp.grad_scaler import GradScaler

from keepstep.optim import OptimizerWrapper


class ClosureOptimizer(OptimizerWrapper):
    """``keepstep.Optimizer`` that runs Lightning's closure, which is the forward and backward pass, before the commit.

    Attributes:
        committed: whether the last step committed.
    """

    committed = False

    def step(self, closure: Callable[[], Any] | None = None, *, grad_scaler: GradScaler | None = None) -> Any:
        """Run the closure, and step the optimizer if the step commits. Return what the closure returned."""
        output = closure() if closure is not None else None
        stepped = super().step(grad_scaler=grad_scaler)
        self.committed = stepped or (grad_scaler is not None and self.manager.errored() is None)  # with an overflow
        return output
