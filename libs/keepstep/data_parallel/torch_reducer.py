"""Pieces of torch's reducer and of its autograd that the wrappers of a model need."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.futures import Future
from torch.nn.parallel.distributed import _find_tensors
from torch.utils import checkpoint

from keepstep.process_group import ProcessGroupDummy


class ReducerGroup(ProcessGroupDummy):
    """The process group of torch's reducer.

    The reducer runs one collective in it, to find the parameters that were used. The result here is all parameters, so
    that every parameter gets its averaged gradient; ``GradientUsage`` removes those that no group has.
    """

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        for tensor in tensors if isinstance(tensors, (list, tuple)) else [tensors]:
            if tensor.dtype is not torch.int32:  # a gradient: an option of torch reduces it beside the buckets
                raise RuntimeError(
                    "torch's DistributedDataParallel reduced a gradient without keepstep's hook, so it would be "
                    "averaged over no groups: remove the option of torch that does so, such as optimize_ddp = "
                    "'python_reducer' of torch._dynamo"
                )
            tensor.fill_(1)
        return super().allreduce(tensors, opts, timeout)


class Reach(torch.autograd.Function):
    """A tensor whose graph leads to all parameters."""

    @staticmethod
    def forward(_ctx: Any, *parameters: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(_ctx: Any, *_gradients: torch.Tensor) -> Any:
        raise RuntimeError("the graph that torch's reducer searches has no backward pass")


forward_pass = threading.local()
"""``reentrant``: whether the forward pass of this thread used a reentrant checkpoint."""


@functools.cache
def notice_reentrant_checkpoints() -> None:
    """Patch torch's reentrant checkpoints to set ``forward_pass.reentrant``; torch has no hook for them."""
    original = checkpoint.CheckpointFunction.forward

    @functools.wraps(original)
    def forward(*args: Any) -> Any:
        forward_pass.reentrant = True
        return original(*args)  # type: ignore[no-untyped-call]

    checkpoint.CheckpointFunction.forward = staticmethod(forward)  # type: ignore[method-assign]


def at_end_of_pass(act: Callable[[], None]) -> None:
    """Call ``act`` at the end of the backward pass that runs, after what was added before."""
    torch.autograd.Variable._execution_engine.queue_callback(act)  # noqa: SLF001  torch's own DDP does


def refuse_replaced_weights(output: Any, states_loaded: Callable[[], int]) -> None:
    """Let the backward pass of ``output`` raise if the weights were replaced since its forward pass.

    Args:
        output: of a forward pass outside of a step.
        states_loaded: returns the number of states that this process has loaded.
    """
    loaded = states_loaded()

    def check(_gradient: torch.Tensor) -> None:
        if states_loaded() != loaded:
            raise RuntimeError(
                "the forward pass ran before the step began, and the begin of the step (Optimizer.zero_grad() or "
                "start_quorum()) has replaced the weights by those of another group, so its gradients are of other "
                "weights: call zero_grad() before the forward pass"
            )

    for tensor in _find_tensors(output):  # type: ignore[no-untyped-call]
        if tensor.requires_grad:
            tensor.register_hook(check)


def marker(elements: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """Return a parameter that only the reducer knows."""
    return nn.Parameter(torch.zeros(elements, dtype=dtype, device=device))


def done(value: torch.Tensor) -> Future[torch.Tensor]:
    """Return a future that has completed with ``value``."""
    future: Future[torch.Tensor] = Future()
    future.set_result(value)
    return future


@contextlib.contextmanager
def all_trainable(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let parameters that are frozen by now require gradients, for what torch allows for such parameters only."""
    frozen = [one for one in parameters if not one.requires_grad]
    for one in frozen:
        one.requires_grad_(True)
    try:
        yield
    finally:
        for one in frozen:
            one.requires_grad_(False)
