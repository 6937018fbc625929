"""Rehearsals: a script runs a step before its first quorum, so that no other group waits for its first pass."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from torch import nn
from torch.optim import Optimizer

from keepstep.lifecycle.rehearsal.rehearsed_step import RehearsedStep
from keepstep.lifecycle.rehearsal.state_before import StateBefore
from keepstep.lifecycle.state_and_progress import StateAndProgress
from keepstep.step.attempt import Attempt


class Rehearsing(StateAndProgress):
    """The method of a Manager for rehearsals."""

    _trained: Callable[[], list[nn.Module | Optimizer]]
    """Modules and optimizers of the script."""
    _attempt: Attempt | None

    @contextlib.contextmanager
    def rehearse(self) -> Iterator[None]:
        """Run a step of the script in this context before the first quorum, and undo it.

        The first forward and backward pass compiles, tunes kernels, allocates memory and starts the workers of loaders.
        In a rehearsal this takes place before the group joins a step, so that no other group waits for it::

            with manager.rehearse():
                optimizer.zero_grad()
                loss_of(ddp, a_batch).backward()
                optimizer.step()

        No other group takes part: collectives have the result of a group that is alone. ``should_commit`` and
        ``Optimizer.step`` return False, and ``Optimizer`` steps its inner optimizer. At the end, also after an error,
        these are as before: parameters, buffers and gradients of modules in ``DistributedDataParallel``, state of
        optimizers in ``Optimizer``, tensors of registered states, and the random generators of Python, numpy and torch.
        The position of an ``ElasticSampler`` does not move; a loader of the script's own has moved on, so give it a
        batch of its own. Needs main memory for a copy of these tensors.

        Not inside of LocalSGD, DiLoCo, or ``keepstep.outer``.

        Raises:
            RuntimeError: this process has begun a step.
        """
        if self.rehearsing or self._attempt is not None:
            raise RuntimeError(
                "rehearse() belongs before the first step, and this process has begun one; call it once, after the "
                "model and the optimizer are wrapped and before the training loop"
            )
        context, began = self._context, time.monotonic()
        context.raise_fatal()
        before = StateBefore(self._trained(), context.state.user_state())
        self._rehearsing = True
        try:
            yield
        finally:
            self._rehearsing, self._attempt = False, None
            before.restore()
        context.log.info("rehearsed a step", seconds=round(time.monotonic() - began, 3))

    def _begin_rehearsed_step(self) -> None:
        if self._attempt is None or not self._attempt.goes_on(()):
            self._attempt = RehearsedStep(self._context)
