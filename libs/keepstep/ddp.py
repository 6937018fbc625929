"""Data parallelism over replica groups: the Manager averages the gradients, and buffers are made equal with them.

torch's reducer fills the buckets. The buckets must always be the same in every group, also in a group that joins later,
so they are never rebuilt in the order of the first backward pass (``find_unused_parameters`` prevents it).

Every backward pass is averaged, whatever its graph is: of several forward passes, of a part of the outputs, of a term
that uses the parameters themselves. The reducer expects the gradients of all parameters, and what has not come at the
end of the pass is unused. If a pass left parameters out, the next ones look at their graph when they begin, so that the
buckets of such parameters are reduced in time too.

Two parameters of one bucket each are the reducer's alone:

* ``signal`` is ready with the first gradient of a pass. Its bucket, the first one, only tells that the pass began.
* ``flags`` is in the last bucket. It carries the usage of the parameters (``gradient_usage``).

Parameters inside a reentrant activation checkpoint may get several gradients in one pass. After a forward pass with
such a checkpoint, the same buckets are reduced in the same order at the end of the backward pass.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import nn
from torch.distributed import GradBucket, Work
from torch.futures import Future
from torch.nn import parallel
from torch.nn.parallel.distributed import _find_tensors

from keepstep.data_parallel.gradient_usage import GradientUsage
from keepstep.data_parallel.module_layout import ModuleLayout
from keepstep.data_parallel.sparse_gradients import average_sparse
from keepstep.data_parallel.synced_buffers import AVERAGED_DTYPES, SyncedBuffers
from keepstep.data_parallel.torch_reducer import (
    Reach,
    ReducerGroup,
    all_trainable,
    at_end_of_pass,
    done,
    forward_pass,
    marker,
    notice_reentrant_checkpoints,
    refuse_replaced_weights,
)
from keepstep.data_parallel.trained_parameters import TrainedParameters, left_out
from keepstep.lifecycle.manager_like import as_manager
from keepstep_mesh.errors import KeepstepError

if TYPE_CHECKING:
    from keepstep.manager import Manager


_patching = threading.Lock()
"""Groups may be threads of one process, and the filters of warnings are those of the whole process."""

REFUSED = (
    "process_group",
    "static_graph",
    "delay_all_reduce_named_params",
    "param_to_hook_all_reduce",
    "skip_all_reduce_unused_params",
)
"""Arguments of torch's class that keepstep's does not take."""
IGNORED = ("init_sync", "broadcast_buffers", "forward_sync_buffers", "find_unused_parameters")


class _Expects(Enum):
    """State of a ``DistributedDataParallel`` between two backward passes: the gradients that it expects next.

    A forward pass with gradients leads to ``FORWARD`` or ``REENTRANT``, the end of an averaged backward pass to
    ``AGAIN``, that of a local one to ``NOTHING``. So does the begin of a forward pass: the pass before may have raised.
    """

    NOTHING = "the reducer expects no gradients: the pass is local"
    FORWARD = "the reducer expects the gradients of a forward pass: the pass is averaged"
    REENTRANT = "the forward pass had a reentrant checkpoint: all buckets are averaged at the end of the pass"
    AGAIN = "the reducer expects gradients without a forward pass: the pass is averaged in the step of the last one"


_FLAGS = (bool, _Expects)


class DistributedDataParallel(parallel.DistributedDataParallel):
    """``torch.nn.parallel.DistributedDataParallel`` whose gradients go through ``manager.allreduce``.

    It trains what torch's class trains, with and without ``find_unused_parameters``. A parameter that no group used
    keeps the gradient None; one that some group used has the average in all groups. Parameters may be frozen, unfrozen,
    added, replaced and cast between two steps, in all groups alike. A sparse gradient, of ``nn.Embedding(sparse=True)``
    for example, stays sparse.

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
            Buffers and sparse gradients are not quantized. All groups must give the same value.
        **kwargs: of torch's class. ``find_unused_parameters``, ``init_sync``, ``broadcast_buffers`` and
            ``forward_sync_buffers`` are set here and ignored. ``gradient_as_bucket_view`` defaults to True, which saves
            a copy of all gradients.

    Raises:
        ValueError: an argument of torch's class that is not supported was given, a gradient cannot be averaged, a
            buffer cannot be synchronized, or a name matches no buffer.
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
        for name in REFUSED:
            if kwargs.pop(name, None):
                raise ValueError(
                    f"{name} is not supported: keepstep's DistributedDataParallel sets it; remove the argument"
                )
        for name in IGNORED:
            kwargs.pop(name, None)
        kwargs.setdefault("gradient_as_bucket_view", True)
        manager = as_manager(manager)
        buffers = SyncedBuffers(manager, module, sync=sync_buffers, average=average_buffers, ignore=ignore_buffers)
        self._trained = TrainedParameters(module, getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        self._keepstep_manager = manager
        self._synced = buffers
        self._should_quantize = should_quantize
        self._sparse_hooks: list[Any] = []
        self._averages_at_end = False
        """True from a forward pass through a reentrant checkpoint to the end of its backward pass."""
        self._expects = _Expects.NOTHING
        self._averaged_in: int | None = None
        """``Steps.open_number`` of the step of the last averaged pass; None: no step was open."""
        self._queued = False
        """Whether the end of the present pass calls ``_complete`` or ``_reduce_all``."""
        self._local = False
        """Whether the present pass is not averaged."""
        self._reducing_all = False
        """Whether ``_reduce_all`` runs."""
        self._last_bucket_started = False
        self._works: list[Work] = []
        """All-reduces that the end of the pass waits for."""
        self._left_out = False
        """Whether the last pass left parameters out."""
        with _patching, warnings.catch_warnings():
            # of broadcast_buffers; older versions of torch do not have its successor
            warnings.simplefilter("ignore", FutureWarning)
            notice_reentrant_checkpoints()
            super().__init__(
                module,
                process_group=ReducerGroup(0, 1),
                init_sync=False,
                broadcast_buffers=False,
                find_unused_parameters=True,
                **kwargs,
            )
        self.register_comm_hook(self, _average_bucket)
        manager.script_checker.add_module(module)
        buckets = str(kwargs.get("bucket_cap_mb") or "default")
        header = _header(buckets, should_quantize=should_quantize)
        manager.steps.add_layout(ModuleLayout(header, self._trained, buffers.lines, self._rebuild))

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        _refuse_copy(self)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a flag without ``nn.Module``'s search for parameters, a tenth of the instructions of a small step."""
        if type(value) in _FLAGS:
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    # ---- the reducer of torch

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        """Return the parameters of the reducer, ``flags`` first and ``signal`` last. None has a sparse gradient."""
        self._assign_modules_buffers()  # type: ignore[no-untyped-call]
        members, sparse = self._trained.members, self._trained.sparse
        self._dense = [one for name, one in members.items() if name not in sparse]
        self._sparse = [(name, one) for name, one in members.items() if name in sparse]
        self._usage = GradientUsage(self._dense)
        for hook in self._sparse_hooks:
            hook.remove()
        with all_trainable([one for _, one in self._sparse]):
            self._sparse_hooks = [
                one.register_post_accumulate_grad_hook(self._sparse_gradient_came)  # type: ignore[no-untyped-call]
                for _, one in self._sparse
            ]
        first = next(iter([*self._dense, *members.values()]))
        own = [one for one in AVERAGED_DTYPES if all(one is not used.dtype for used in self._dense)]
        # an own dtype is an own bucket: in a bucket that is sent in 8 bits the flags would be lost
        self._flags = (
            marker(max(1, len(self._dense)), own[1] if self._should_quantize else first.dtype, first.device),
        )
        self._signal = (marker(1, own[0], first.device),)
        reduced = [*self._flags, *self._dense, *self._signal]
        return reduced, [False] * len(reduced)

    def _build_debug_param_to_name_mapping(self, parameters: list[nn.Parameter]) -> dict[int, str]:
        names = {id(one): name for name, one in self._trained.members.items()}
        return {number: names.get(id(one), "a marker of keepstep") for number, one in enumerate(parameters)}

    def _ddp_init_helper(self, *args: Any, **kwargs: Any) -> None:
        with torch.inference_mode(mode=False), torch.enable_grad(), all_trainable(self._dense):
            super()._ddp_init_helper(*args, **kwargs)  # type: ignore[no-untyped-call]
            reach = [Reach.apply(*self._dense)] if self._dense else []  # type: ignore[no-untyped-call]
        self._reach: list[torch.Tensor] = reach
        self._nodes = [node for one in reach for node, _ in one.grad_fn.next_functions]

    def _rebuild(self) -> None:
        """Make the reducer of the present members, between two steps."""
        self.reducer._remove_autograd_hooks()  # noqa: SLF001
        self._module_parameters = list(self._trained.members.values())
        parameters, sparse = self._build_params_for_reducer()
        self._ddp_init_helper(parameters, sparse, self._build_debug_param_to_name_mapping(parameters), False)
        self._comm_hooks.clear()
        self.register_comm_hook(self, _average_bucket)
        self._disarm()

    # ---- a backward pass

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Run the module; the backward pass of the result averages the gradients."""
        forward_pass.reentrant = False
        if torch.is_grad_enabled() and self.require_backward_grad_sync:
            self._disarm()  # a backward pass that raised leaves the reducer waiting for gradients
        return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Keep the gradients of the forward passes in this context local, as in torch."""
        with super().no_sync():
            if self._expects in (_Expects.NOTHING, _Expects.AGAIN):
                self._disarm()
            yield

    def _post_forward(self, output: Any) -> Any:
        self.require_forward_param_sync = torch.is_grad_enabled() and self.require_backward_grad_sync
        if not self.require_forward_param_sync:
            return output
        _refuse_replaced_weights(self._keepstep_manager, output)
        self._averages_at_end |= forward_pass.reentrant
        if self._averages_at_end:
            self._expects = _Expects.REENTRANT
        else:
            self._arm(_Expects.FORWARD)
            if not self._left_out:
                return output
        tensors = [one for one in _find_tensors(output) if one.requires_grad]  # type: ignore[no-untyped-call]
        if self._averages_at_end and not tensors:
            raise RuntimeError(
                f"the forward pass used a reentrant activation checkpoint and returned a {type(output).__name__}, in "
                f"which no tensor was found, so the end of its backward pass is unknown: return tensors, or a list, "
                f"tuple, dict or dataclass of them, or use checkpoint(..., use_reentrant=False)"
            )
        for tensor in tensors:
            tensor.register_hook(self._pass_began)
        return output

    def _arm(self, expects: _Expects) -> None:
        """Let the reducer expect gradients of all parameters."""
        self._expects = expects
        self.reducer.prepare_for_backward(self._reach)

    @property
    def _is_armed(self) -> bool:
        return self._expects in (_Expects.FORWARD, _Expects.AGAIN)

    def _disarm(self) -> None:
        self._expects, self._queued = _Expects.NOTHING, False
        self.reducer._reset_state()  # noqa: SLF001

    def _queue(self, end: Callable[[], None]) -> None:
        if not self._queued:
            self._queued = True
            at_end_of_pass(end)

    def _pass_began(self, _gradient: torch.Tensor) -> None:
        """At the beginning of a backward pass, outside of all checkpoints."""
        if self._averages_at_end:
            self._queue(self._reduce_all)
        elif self._is_armed and not self._queued:
            try:
                used = [torch._C._will_engine_execute_node(node) for node in self._nodes]  # noqa: SLF001
            except RuntimeError:  # of torch.autograd.grad, which accumulates no gradient
                return
            if any(used):
                self._mark(number for number, one in enumerate(used) if not one)

    def _sparse_gradient_came(self, _parameter: torch.Tensor) -> None:
        if self._is_armed:
            self._queue(self._complete)

    def _mark(self, numbers: Iterable[int]) -> None:
        """Tell the reducer that no gradient comes for these parameters, or that it came already."""
        for number in numbers:
            with contextlib.suppress(RuntimeError):  # it came already
                self.reducer._autograd_hook(1 + number)  # type: ignore[attr-defined]  # noqa: SLF001

    def _begin(self) -> None:
        """At the first gradient of a pass."""
        self._last_bucket_started = False
        self._works.clear()
        # A pass without a forward pass of this step is the script's own: a group that joins would not average it.
        step = self._keepstep_manager.steps.open_number
        follows_forward = self._expects in (_Expects.FORWARD, _Expects.REENTRANT)
        self._local = not follows_forward and (step is None or step != self._averaged_in)
        self._queue(self._complete)
        if not self._local:
            self._synced.start()

    def _reduce(self, bucket: GradBucket) -> Future[torch.Tensor]:
        """Reduce a bucket that is complete."""
        buffer, manager = bucket.buffer(), self._keepstep_manager
        first, last = bucket.index() == 0, bucket.is_last()
        if self._reducing_all:  # then the reducer gives all buckets the first index
            one = bucket.parameters()[0]
            first, last = one is self._signal[0], one is self._flags[0]
        if first:
            self._begin()
            return done(buffer)
        if last:
            self._last_bucket_started = True
            self._usage.fill(buffer[: max(1, len(self._dense))])
        if self._local:
            return done(buffer)
        quantize = self._should_quantize and not last
        again = None
        if (
            manager.retry_allreduce
            and self.gradient_as_bucket_view
            and any(p.grad is None for p in bucket.parameters())
        ):
            again = self._usage.publish_again
        work = manager.allreduce(buffer, should_quantize=quantize, write_back=again)
        if manager.retry_allreduce or not (self.gradient_as_bucket_view and buffer.is_cpu):
            return work.get_future()
        self._works.append(work)  # the gradients are the buffer: the reducer has nothing to do after it
        return done(buffer)

    def _complete(self) -> None:
        """At the end of a pass, whose last buckets may wait for parameters that it did not use."""
        self._left_out = not self._last_bucket_started
        if self._left_out:
            self._mark(range(max(1, len(self._dense))))
        at_end_of_pass(self._end_pass)  # after the reducer has written the gradients

    def _reduce_all(self) -> None:
        self._averages_at_end, self._reducing_all = False, True
        try:
            self.reducer.prepare_for_backward([])
            self.reducer._delay_all_reduce()  # type: ignore[attr-defined]  # noqa: SLF001
        finally:
            self._reducing_all = False
        self._end_pass()

    def _end_pass(self) -> None:
        manager = self._keepstep_manager
        for work in self._works:
            work.wait()
        self._works.clear()
        if not self._local:
            if self._sparse:
                average_sparse(manager, self._sparse)
            if self._trained.changed() and (names := self._trained.outside()):
                manager.report_error(KeepstepError(left_out(names)))
        self._usage.publish(failed=manager.errored() is not None)
        self._disarm()
        if not self._local:  # for a second pass over the same graph, or of the inner module
            self._arm(_Expects.AGAIN)
            self._averaged_in = manager.steps.open_number


def _average_bucket(state: DistributedDataParallel, bucket: GradBucket) -> Future[torch.Tensor]:
    return state._reduce(bucket)  # noqa: SLF001  ours


# torch checks the hook's annotations, and does not evaluate strings
_average_bucket.__annotations__.update({"bucket": GradBucket, "return": Future[torch.Tensor]})


class PureDistributedDataParallel(nn.Module):
    """Averages the gradient of each parameter separately, at the end of the backward pass. Slow for many parameters.

    All parameters are reduced in the module's order, those without a gradient as zeros, so that groups whose passes
    used different parameters never average one parameter with another. It trains all models that
    ``DistributedDataParallel`` trains.

    Args:
        manager: of this replica group.
        module: its gradients are averaged over the groups.
        sync_buffers: as in ``DistributedDataParallel``.
        average_buffers: as in ``DistributedDataParallel``.
        ignore_buffers: as in ``DistributedDataParallel``.
        should_quantize: as in ``DistributedDataParallel``. A gradient of up to 64 elements is not smaller than as
            float32.

    Raises:
        ValueError: a gradient cannot be averaged, a buffer cannot be synchronized, or a name matches no buffer.
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
        manager = as_manager(manager)
        self._synced = SyncedBuffers(manager, module, sync=sync_buffers, average=average_buffers, ignore=ignore_buffers)
        self._trained = TrainedParameters(module)
        self.module = module
        self._keepstep_manager = manager
        self._should_quantize = should_quantize
        self._averaging = False
        self._hooks: list[Any] = []
        self._watch()
        manager.script_checker.add_module(module)
        header = _header("one bucket a parameter", should_quantize=should_quantize)
        manager.steps.add_layout(ModuleLayout(header, self._trained, self._synced.lines, self._watch))

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        _refuse_copy(self)

    def _watch(self) -> None:
        """Call ``_queue_averaging`` with each gradient of a present member."""
        for hook in self._hooks:
            hook.remove()
        with all_trainable(self._trained.members.values()):
            self._hooks = [
                one.register_post_accumulate_grad_hook(self._queue_averaging)  # type: ignore[no-untyped-call]
                for one in self._trained.members.values()
            ]

    def forward(self, *args: object, **kwargs: object) -> object:
        """Run the module; the backward pass of the result averages the gradients."""
        self._averaging = False  # a backward pass that raised did not reset it
        output = self.module(*args, **kwargs)
        _refuse_replaced_weights(self._keepstep_manager, output)
        return output

    def _queue_averaging(self, _parameter: torch.Tensor) -> None:
        if not self._averaging:
            self._averaging = True
            at_end_of_pass(self._average)

    def _average(self) -> None:
        self._averaging = False
        manager, trained = self._keepstep_manager, self._trained
        self._synced.start()
        dense = [one for name, one in trained.members.items() if name not in trained.sparse]
        sparse = [(name, one) for name, one in trained.members.items() if name in trained.sparse]
        usage, works = GradientUsage(dense), []
        if dense:
            flags = torch.zeros(len(dense), device=dense[0].device)
            usage.fill(flags)
            works.append(manager.allreduce(flags, write_back=usage.publish_again))
        for parameter in dense:
            again = None
            if parameter.grad is None:
                parameter.grad, again = torch.zeros_like(parameter), usage.publish_again
            works.append(manager.allreduce(parameter.grad, should_quantize=self._should_quantize, write_back=again))
        if sparse:
            average_sparse(manager, sparse)
        for work in works:
            work.wait()
        if trained.changed() and (names := trained.outside()):
            manager.report_error(KeepstepError(left_out(names)))
        usage.publish(failed=manager.errored() is not None)


def _refuse_copy(wrapper: nn.Module) -> NoReturn:
    raise TypeError(
        f"{type(wrapper).__name__} cannot be copied or pickled, because it belongs to a Manager: copy or "
        f"save the module inside it (ddp.module), or its state_dict()"
    )


def _refuse_replaced_weights(manager: Manager, output: object) -> None:
    """Let the backward pass of ``output`` raise if the weights are replaced until then: by a heal in ``zero_grad``."""
    if manager.steps.open_number is None:
        refuse_replaced_weights(output, lambda: manager.steps.states_loaded)


def _header(bucket_cap_mb: str, *, should_quantize: bool) -> str:
    """Return the first line of the layout of a module."""
    return f"bucket_cap_mb {bucket_cap_mb}{', should_quantize' if should_quantize else ''}"
