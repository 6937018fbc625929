"""Data parallelism over replica groups: gradients are averaged by the Manager, buffers made equal with them.

torch's reducer does the bucketing. Its buckets must be the same in every group at every moment, also in one that
joins today, so they are never rebuilt in the order of a first backward pass (``find_unused_parameters`` holds them).
A parameter that a step did not use counts with a gradient of zero.

Parameters below a reentrant activation checkpoint are in no graph before the backward pass reaches them: the reducer
would take them for unused. After a forward pass with such a checkpoint all buckets are reduced at the end of the
backward pass, the same buckets in the same order.
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
    """What torch's reducer takes for its process group. The only collective that it still runs there agrees on which
    parameters were used; we say all, so that every parameter takes its averaged gradient in every group.
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
def _spend_torchs_warning() -> None:
    """Once a process torch's reducer warns, on the C++ side, that it looked for unused parameters and found none.

    That is no waste here, where the look holds the buckets, and nobody could act upon it. So it is said now, to nobody.
    """

    def look(value: float) -> float:
        with torch.inference_mode(mode=False), torch.enable_grad():
            parallel.DistributedDataParallel(
                _OneParameter(), process_group=_ReducerGroup(0, 1), init_sync=False, find_unused_parameters=True
            )(torch.zeros(1, device="cpu"))
        return value

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torch.zeros(1, device="cpu").apply_(look)  # what C++ warns of below a method of torch's comes to Python


_forward_pass = threading.local()
"""``reentrant``: the forward pass of this thread came through a reentrant checkpoint."""


@functools.cache
def _notice_reentrant_checkpoints() -> None:
    """From now on torch's reentrant checkpoints set ``_forward_pass.reentrant``: nothing else tells of them in time."""
    original = checkpoint.CheckpointFunction.forward

    @functools.wraps(original)
    def forward(*args: Any) -> Any:
        _forward_pass.reentrant = True
        return original(*args)  # type: ignore[no-untyped-call]

    checkpoint.CheckpointFunction.forward = staticmethod(forward)  # type: ignore[method-assign]


class DistributedDataParallel(parallel.DistributedDataParallel):
    """``torch.nn.parallel.DistributedDataParallel`` whose gradients go through ``manager.allreduce``.

    Args:
        manager: of this replica group.
        module: whose parameters' gradients are averaged over the groups.
        sync_buffers: make the buffers equal over the groups with the gradients: running statistics of BatchNorm's kind
            are averaged, every other buffer is taken from the first group, bit for bit.
        average_buffers: names, or shell patterns of names, of further float buffers to average while their module
            trains.
        ignore_buffers: the same, of buffers that each group keeps to itself: they cost nothing, and are equal over the
            groups only if the script makes them so. Constants are, and caches need not be.
        **kwargs: of torch's class; ``find_unused_parameters``, ``process_group``, ``init_sync`` and
            ``broadcast_buffers`` are set here. ``gradient_as_bucket_view`` is True unless given: it saves a copy of all
            gradients.

    Raises:
        ValueError: an argument that is set here; a buffer that cannot be synchronized; a name that fits no buffer.

    A peer that dies in the backward pass rejects the step, it does not raise. A buffer that has another shape or dtype
    than when it was wrapped raises RuntimeError there. ``no_sync()`` accumulates as with torch's. Activation
    checkpoints of torch work; with ``use_reentrant=True`` the averaging does not overlap the backward pass.
    """

    def __init__(
        self,
        manager: Manager,
        module: nn.Module,
        sync_buffers: bool = True,
        *,
        average_buffers: Sequence[str] = (),
        ignore_buffers: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        for name in ("process_group", "init_sync", "broadcast_buffers", "find_unused_parameters", "static_graph"):
            if kwargs.pop(name, None) and name in ("process_group", "static_graph"):
                raise ValueError(f"{name} cannot be given: keepstep's DistributedDataParallel sets it")
        kwargs.setdefault("gradient_as_bucket_view", True)
        buffers = SyncedBuffers(manager, module, sync=sync_buffers, average=average_buffers, ignore=ignore_buffers)
        _spend_torchs_warning()
        _notice_reentrant_checkpoints()
        self._reduces_at_the_end = False
        """From a forward pass through a reentrant checkpoint to the end of the backward pass."""
        self._reduction_queued = False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of broadcast_buffers, whose successor older torch lacks
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
        self.register_comm_hook(self, _average_bucket)
        manager.add_layout(_layout(module, str(kwargs.get("bucket_cap_mb") or "default"), buffers))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        _forward_pass.reentrant = False
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self.reducer._reset_state()  # noqa: SLF001  a backward pass that raised left it waiting for gradients
            self._reduction_queued = False
        return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    def _post_forward(self, output: Any) -> Any:
        synced = torch.is_grad_enabled() and self.require_backward_grad_sync
        self._reduces_at_the_end |= synced and _forward_pass.reentrant
        if not (synced and self._reduces_at_the_end):
            return super()._post_forward(output)  # type: ignore[no-untyped-call]
        with self.no_sync():  # the reducer does not wait for gradients
            output = super()._post_forward(output)  # type: ignore[no-untyped-call]
        for tensor in _find_tensors(output):  # type: ignore[no-untyped-call]
            if tensor.requires_grad:
                tensor.register_hook(self._queue_reduction)
        return output

    def _queue_reduction(self, _gradient: torch.Tensor) -> None:
        """Runs at the beginning of the backward pass, outside of all checkpoints."""
        if not self._reduction_queued:
            self._reduction_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._reduce_all)  # noqa: SLF001

    def _reduce_all(self) -> None:
        self._reduces_at_the_end = self._reduction_queued = False
        self.reducer.prepare_for_backward([])
        self.reducer._delay_all_reduce()  # type: ignore[attr-defined]  # noqa: SLF001


def _average_bucket(state: DistributedDataParallel, bucket: GradBucket) -> Future[torch.Tensor]:
    if bucket.index() == 0:
        state._synced.start()  # noqa: SLF001  ours
    work = state._keepstep_manager.allreduce(bucket.buffer())  # noqa: SLF001
    return work.get_future()


# torch looks at the hook's annotations, and does not read them as strings
_average_bucket.__annotations__.update({"bucket": GradBucket, "return": Future[torch.Tensor]})


class PureDistributedDataParallel(nn.Module):
    """Averages each parameter's gradient on its own at the end of the backward pass, and waits for all of them. Simple,
    and slow for many parameters.

    All parameters are reduced in the module's order, those without a gradient as zeros: so groups whose passes took
    different ways never average one parameter with another.

    Args:
        manager: of this replica group.
        module: whose gradients are averaged.
        sync_buffers, average_buffers, ignore_buffers: as in ``DistributedDataParallel``.

    Raises:
        ValueError: a buffer that cannot be synchronized; a name that fits no buffer.
    """

    def __init__(
        self,
        manager: Manager,
        module: nn.Module,
        sync_buffers: bool = True,
        *,
        average_buffers: Sequence[str] = (),
        ignore_buffers: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self._synced = SyncedBuffers(manager, module, sync=sync_buffers, average=average_buffers, ignore=ignore_buffers)
        self.module = module
        self._keepstep_manager = manager
        self._averaging = False
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._at_the_end)  # type: ignore[no-untyped-call]
        manager.add_layout(_layout(module, "one bucket a parameter", self._synced))

    def forward(self, *args: object, **kwargs: object) -> object:
        self._averaging = False  # a backward pass that raised has no end
        return self.module(*args, **kwargs)

    def _at_the_end(self, _parameter: torch.Tensor) -> None:
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
                works.append(self._keepstep_manager.allreduce(parameter.grad))
        for work in works:
            work.wait()


def _layout(module: nn.Module, bucket_cap_mb: str, buffers: SyncedBuffers) -> list[str]:
    """What must be the same in all groups for their buckets to mean the same, one line each."""
    lines = [f"bucket_cap_mb {bucket_cap_mb}"]
    lines += [
        f"{name} {tuple(p.shape)} {p.dtype} {p.device.type}" for name, p in module.named_parameters() if p.requires_grad
    ]
    return lines + buffers.lines
