"""Data parallelism over replica groups: the Manager averages the gradients, and buffers are made equal with them.

torch's reducer fills the buckets. The buckets must always be the same in every group, also in a group that joins later,
so they are never rebuilt in the order of the first backward pass (``find_unused_parameters`` prevents it). A parameter
that a step does not use has a gradient of zero.

Parameters inside a reentrant activation checkpoint are in no graph until the backward pass reaches them, and the
reducer would treat them as unused. After a forward pass with such a checkpoint, the same buckets are reduced in the
same order at the end of the backward pass.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import GradBucket
from torch.futures import Future
from torch.nn import parallel
from torch.nn.parallel.distributed import _find_tensors
from torch.utils import checkpoint

from keepstep.data_parallel.synced_buffers import SyncedBuffers
from keepstep.process_group import ProcessGroupDummy

if TYPE_CHECKING:
    from keepstep.manager import Manager


class _ReducerGroup(ProcessGroupDummy):
    """The process group of torch's reducer.

    The reducer runs one collective in it, to find the parameters that were used. The result here is all parameters, so
    that every parameter gets its averaged gradient in every group.
    """

    def allreduce(self, tensors: Any, opts: Any = None, timeout: Any = None) -> dist.Work:
        for tensor in tensors if isinstance(tensors, (list, tuple)) else [tensors]:
            tensor.fill_(1)
        return super().allreduce(tensors, opts, timeout)


class _OneParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, device="cpu"))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


@functools.cache
def _trigger_torchs_warning() -> None:
    """Trigger a warning of torch's reducer now, where it is ignored.

    The reducer warns once per process, in C++, that it searched for unused parameters and found none. The search is
    needed here, to keep the buckets, and users cannot change it.
    """

    def look(value: float) -> float:
        with torch.inference_mode(mode=False), torch.enable_grad():
            parallel.DistributedDataParallel(
                _OneParameter(), process_group=_ReducerGroup(0, 1), init_sync=False, find_unused_parameters=True
            )(torch.zeros(1, device="cpu"))
        return value

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.zeros(1, device="cpu").apply_(look)  # inside a method of torch, a warning from C++ becomes one of Python


_forward_pass = threading.local()
"""``reentrant``: whether the forward pass of this thread used a reentrant checkpoint."""


@functools.cache
def _notice_reentrant_checkpoints() -> None:
    """Patch torch's reentrant checkpoints to set ``_forward_pass.reentrant``; torch has no hook for them."""
    original = checkpoint.CheckpointFunction.forward

    @functools.wraps(original)
    def forward(*args: Any) -> Any:
        _forward_pass.reentrant = True
        return original(*args)  # type: ignore[no-untyped-call]

    checkpoint.CheckpointFunction.forward = staticmethod(forward)  # type: ignore[method-assign]


_patching = threading.Lock()
"""Groups may be threads of one process, and the filters of warnings are those of the whole process."""


def _prepare_torch() -> None:
    """Trigger torch's warning and patch its reentrant checkpoints, once per process."""
    with _patching:
        _trigger_torchs_warning()
        _notice_reentrant_checkpoints()


class DistributedDataParallel(parallel.DistributedDataParallel):
    """``torch.nn.parallel.DistributedDataParallel`` whose gradients go through ``manager.allreduce``.

    If another group dies during the backward pass, the step does not commit; the pass does not raise. A buffer whose
    shape or dtype has changed since it was wrapped raises RuntimeError in the backward pass. ``no_sync()`` accumulates
    gradients as in torch. Activation checkpoints of torch work; with ``use_reentrant=True`` the averaging does not
    overlap the backward pass.

    Args:
        manager: of this replica group.
        module: its gradients are averaged over the groups.
        sync_buffers: make the buffers equal over the groups together with the gradients. Running statistics of
            BatchNorm and its kind are averaged; every other buffer is copied from the first group, bit for bit.
        average_buffers: names, or shell patterns of names, of further float buffers to average while their module
            trains.
        ignore_buffers: names, or shell patterns of names, of buffers that are not synchronized. They cost nothing, and
            are equal over the groups only if the script keeps them equal. Suited to constants and caches.
        should_quantize: average the gradients with 8-bit values, a quarter of the bytes; see ``keepstep.collectives``.
            Buffers are not quantized. All groups must give the same value.
        **kwargs: of torch's class. ``find_unused_parameters``, ``init_sync`` and ``broadcast_buffers`` are set here and
            ignored. ``gradient_as_bucket_view`` defaults to True, which saves a copy of all gradients.

    Raises:
        ValueError: ``process_group`` or ``static_graph`` was given, a buffer cannot be synchronized, or a name matches
            no buffer.
    """

    def __init__(
        self,
        manager: Manager,
        module: nn.Module,
        sync_buffers: bool = True,
        *,
        average_buffers: Sequence[str] = (),
        ignore_buffers: Sequence[str] = (),
        should_quantize: bool = False,
        **kwargs: Any,
    ) -> None:
        for name in ("process_group", "init_sync", "broadcast_buffers", "find_unused_parameters", "static_graph"):
            if kwargs.pop(name, None) and name in ("process_group", "static_graph"):
                raise ValueError(
                    f"{name} is not supported: keepstep's DistributedDataParallel sets it; remove the argument"
                )
        kwargs.setdefault("gradient_as_bucket_view", True)
        buffers = SyncedBuffers(manager, module, sync=sync_buffers, average=average_buffers, ignore=ignore_buffers)
        _prepare_torch()
        self._averages_at_end = False
        """True from a forward pass through a reentrant checkpoint to the end of its backward pass."""
        self._reduction_queued = False
        with _patching, warnings.catch_warnings():
            # of broadcast_buffers; older versions of torch do not have its successor
            warnings.simplefilter("ignore", FutureWarning)
            super().__init__(
                module,
                process_group=_ReducerGroup(0, 1),
                init_sync=False,
                broadcast_buffers=False,
                find_unused_parameters=True,
                **kwargs,
            )
        self._keepstep_manager = manager
        self._synced = buffers
        self._should_quantize = should_quantize
        self.register_comm_hook(self, _average_bucket)
        manager.script_checker.add_module(module)
        buckets = str(kwargs.get("bucket_cap_mb") or "default")
        manager.add_layout(_layout(module, buckets, buffers, should_quantize=should_quantize))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; the backward pass of the result averages the gradients."""
        _forward_pass.reentrant = False
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self.reducer._reset_state()  # noqa: SLF001  a backward pass that raised leaves it waiting for gradients
            self._reduction_queued = False
        return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    def _post_forward(self, output: Any) -> Any:
        synced = torch.is_grad_enabled() and self.require_backward_grad_sync
        self._averages_at_end |= synced and _forward_pass.reentrant
        if not (synced and self._averages_at_end):
            return super()._post_forward(output)  # type: ignore[no-untyped-call]
        with self.no_sync():  # so that the reducer does not wait for gradients
            output = super()._post_forward(output)  # type: ignore[no-untyped-call]
        for tensor in _find_tensors(output):  # type: ignore[no-untyped-call]
            if tensor.requires_grad:
                tensor.register_hook(self._queue_reduction)
        return output

    def _queue_reduction(self, _gradient: torch.Tensor) -> None:
        """At the beginning of the backward pass, outside of all checkpoints."""
        if not self._reduction_queued:
            self._reduction_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._reduce_all)  # noqa: SLF001

    def _reduce_all(self) -> None:
        self._averages_at_end = self._reduction_queued = False
        self.reducer.prepare_for_backward([])
        self.reducer._delay_all_reduce()  # type: ignore[attr-defined]  # noqa: SLF001


def _average_bucket(state: DistributedDataParallel, bucket: GradBucket) -> Future[torch.Tensor]:
    if bucket.index() == 0:
        state._synced.start()  # noqa: SLF001  ours
    work = state._keepstep_manager.allreduce(  # noqa: SLF001
        bucket.buffer(),
        should_quantize=state._should_quantize,  # noqa: SLF001
    )
    return work.get_future()


# torch checks the hook's annotations, and does not evaluate strings
_average_bucket.__annotations__.update({"bucket": GradBucket, "return": Future[torch.Tensor]})


class PureDistributedDataParallel(nn.Module):
    """Averages the gradient of each parameter separately, at the end of the backward pass. Slow for many parameters.

    All parameters are reduced in the module's order, those without a gradient as zeros, so that groups whose passes
    used different parameters never average one parameter with another.

    Args:
        manager: of this replica group.
        module: its gradients are averaged over the groups.
        sync_buffers: as in ``DistributedDataParallel``.
        average_buffers: as in ``DistributedDataParallel``.
        ignore_buffers: as in ``DistributedDataParallel``.
        should_quantize: as in ``DistributedDataParallel``. A gradient of up to 64 elements is not smaller than as
            float32.

    Raises:
        ValueError: a buffer cannot be synchronized, or a name matches no buffer.
    """

    def __init__(
        self,
        manager: Manager,
        module: nn.Module,
        sync_buffers: bool = True,
        *,
        average_buffers: Sequence[str] = (),
        ignore_buffers: Sequence[str] = (),
        should_quantize: bool = False,
    ) -> None:
        super().__init__()
        self._synced = SyncedBuffers(manager, module, sync=sync_buffers, average=average_buffers, ignore=ignore_buffers)
        self.module = module
        self._keepstep_manager = manager
        self._should_quantize = should_quantize
        self._averaging = False
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._queue_averaging)  # type: ignore[no-untyped-call]
        manager.script_checker.add_module(module)
        manager.add_layout(_layout(module, "one bucket a parameter", self._synced, should_quantize=should_quantize))

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the module; the backward pass of the result averages the gradients."""
        self._averaging = False  # a backward pass that raised did not reset it
        return self.module(*args, **kwargs)

    def _queue_averaging(self, _parameter: torch.Tensor) -> None:
        if not self._averaging:
            self._averaging = True
            torch.autograd.Variable._execution_engine.queue_callback(self._average)  # noqa: SLF001  torch's own DDP does

    def _average(self) -> None:
        self._averaging = False
        self._synced.start()
        works = []
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                works.append(self._keepstep_manager.allreduce(parameter.grad, should_quantize=self._should_quantize))
        for work in works:
            work.wait()


def _layout(module: nn.Module, bucket_cap_mb: str, buffers: SyncedBuffers, *, should_quantize: bool) -> list[str]:
    """Return the layout of the buckets, which must be equal in all groups: one line for each parameter and buffer."""
    lines = [f"bucket_cap_mb {bucket_cap_mb}{', should_quantize' if should_quantize else ''}"]
    lines += [
        f"{name} {tuple(p.shape)} {p.dtype} {p.device.type}{_order_in_memory(p)}"
        for name, p in module.named_parameters()
        if p.requires_grad
    ]
    return lines + buffers.lines


def _order_in_memory(parameter: torch.Tensor) -> str:
    """Return the strides of a parameter that is not in torch's usual order, such as channels_last.

    A bucket of torch's reducer has the gradients in the order of their parameters in memory.
    """
    return "" if parameter.is_contiguous() else f" strides {parameter.stride()}"
