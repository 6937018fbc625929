"""A model and an optimizer of an ``Accelerator``, in step with the other groups.

A step that does not commit is for Accelerate a step whose gradients overflowed: ``optimizer_step_was_skipped`` is True,
and schedulers do not step.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.distributed.fsdp import FSDPModule, fully_shard

from keepstep.ddp import DistributedDataParallel
from keepstep.device_mesh import average_over_groups
from keepstep.manager import Manager
from keepstep.optim import OptimizerWrapper
from keepstep.state.values.first_optimizer_state import creating_state
from keepstep.state.values.sharding import is_dtensor


class _NotedOptimizer(OptimizerWrapper):
    """Notes whether it stepped. Its step begins with the forward pass, and not in ``zero_grad``."""

    stepped = True
    committed = False

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optim.zero_grad(set_to_none)

    def step(self, closure: Any = None, *, grad_scaler: GradScaler | None = None) -> bool:  # type: ignore[override]
        self.stepped = super().step(closure, grad_scaler=grad_scaler)
        self.committed = self.stepped or (grad_scaler is not None and self.manager.errored() is None)
        return self.stepped


class GroupOptimizer(AcceleratedOptimizer):  # type: ignore[misc]  # its package may be missing
    """An optimizer of Accelerate that steps if the groups commit.

    Args:
        manager: of this replica group.
        accelerated: what ``Accelerator.prepare`` returned.
    """

    def __init__(self, manager: Manager, accelerated: AcceleratedOptimizer) -> None:
        noted = _NotedOptimizer(manager, accelerated.optimizer)
        super().__init__(noted, device_placement=False, scaler=accelerated.scaler)

    def step(self, closure: Any = None) -> None:
        """Step with the last batch of an accumulation; with a GradScaler too, which Accelerate hides from the step."""
        if creating_state():
            self.optimizer.optim.step()  # no step of the training: a GradScaler counts no update, and none was skipped
            return
        if not self.gradient_state.sync_gradients:
            return
        if self.scaler is None:
            self.optimizer.step(closure)
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step changed no weights: it did not commit, or its gradients overflowed."""
        return not self.optimizer.stepped

    @property
    def committed(self) -> bool:
        """Whether the last step committed."""
        return bool(self.optimizer.committed)


def check_ranks(accelerator: Accelerator, model: nn.Module | None = None) -> None:
    """Raise ValueError unless this group is one process, or its ranks train one model together.

    Args:
        accelerator: of this rank.
        model: as it is trained; None: Accelerate has not prepared it yet.
    """
    kind, ranks = accelerator.distributed_type, max(accelerator.num_processes, int(os.environ.get("WORLD_SIZE", "1")))
    if ranks == 1 or accelerator.is_fsdp2 or (model is not None and is_sharded(model)):
        return
    version = f", fsdp_version={accelerator.state.fsdp_plugin.fsdp_version}" if kind == DistributedType.FSDP else ""
    raise ValueError(
        f"Accelerate is set up for distributed_type={kind.value}{version}, and this group has {ranks} ranks, each of "
        f"which would train a whole model: shard it over them with FSDP2 (fsdp=True in TrainingArguments, or a "
        f"FullyShardedDataParallelPlugin with fsdp_version=2; Accelerate ignores both on the CPU) or with a "
        f"DistributedConfig in from_pretrained; or run one rank a group (keepstep run --nproc-per-replica 1)"
    )


def is_sharded(model: nn.Module) -> bool:
    """Return whether parameters of ``model`` are shards: FSDP2 or tensor parallelism divide them over ranks."""
    return any(map(is_dtensor, model.parameters()))


def give_to_fsdp2(model: Any) -> None:
    """Let FSDP2 reduce the gradients of a model that only tensor parallelism shards, so that groups average them.

    Args:
        model: of ``from_pretrained`` with a ``DistributedConfig``, before its optimizer is made.
    """
    if any(isinstance(one, FSDPModule) for one in model.modules()):
        return
    mesh = model._mesh_manager.get_mesh("fsdp")  # noqa: SLF001  of one rank, and the only one that fits its shards
    layers = [one for one in model.modules() if type(one).__name__ in (model._no_split_modules or ())]  # noqa: SLF001
    for one in (*layers, model):
        fully_shard(one, mesh=mesh)
    model._is_fsdp_managed_module = True  # noqa: SLF001  the Trainer accumulates gradients without a reduction


def replace_optimizer(manager: Manager, accelerator: Accelerator, accelerated: AcceleratedOptimizer) -> GroupOptimizer:
    """Return the optimizer of the group, and let ``accelerator`` know it in place of ``accelerated``."""
    optimizer = GroupOptimizer(manager, accelerated)
    known = accelerator._optimizers  # noqa: SLF001  the list behind optimizer_step_was_skipped
    known[:] = [optimizer if one is accelerated else one for one in known]
    for scheduler in accelerator._schedulers:  # noqa: SLF001  those that were prepared together with it
        scheduler.optimizers = [optimizer if one is accelerated else one for one in scheduler.optimizers]
    return optimizer


def replace_model(manager: Manager, accelerator: Accelerator, model: nn.Module, **kwargs: Any) -> nn.Module:
    """Return the model of the group, and let ``accelerator.no_sync`` and ``accumulate`` keep its gradients local.

    Each forward pass in training mode begins a step, if none is open. A model that is sharded stays as it is:
    ``accelerator.no_sync`` knows it.

    Raises:
        ValueError: arguments of ``DistributedDataParallel`` for a sharded model, or as ``average_over_groups``.
    """

    def begin(module: nn.Module, _arguments: Any) -> None:
        if module.training and torch.is_grad_enabled() and manager.steps.open_number is None:
            manager.start_quorum()

    if not is_sharded(model):
        model = DistributedDataParallel(manager, model, **kwargs)
        accelerator.no_sync = lambda model: getattr(model, "no_sync", contextlib.nullcontext)()
    elif kwargs:
        raise ValueError(f"{', '.join(kwargs)}: arguments of DistributedDataParallel, and this model is sharded")
    else:
        average_over_groups(model, manager)
    model.register_forward_pre_hook(begin, prepend=True)  # before FSDP2 unshards, as a heal reads and writes shards
    return model


def prepare(
    accelerator: Accelerator, manager: Manager, model: nn.Module, optimizer: Any, **kwargs: Any
) -> tuple[nn.Module, GroupOptimizer]:
    """Put what ``accelerator.prepare`` returned in step with the other groups.

    The loop stays as it is: the first forward pass after a step begins the next one. Prepared schedulers step with the
    optimizer only. The state is registered with the Manager as ever.

    Args:
        accelerator: of this rank.
        manager: of this replica group.
        model: prepared.
        optimizer: prepared; one for each Manager.
        **kwargs: of ``keepstep.DistributedDataParallel``, for a model that is not sharded.

    Returns:
        The model and the optimizer for the loop.

    Raises:
        ValueError: the ranks of this group each have a whole model, or as ``average_over_groups``.
    """
    check_ranks(accelerator, model)
    return replace_model(manager, accelerator, model, **kwargs), replace_optimizer(manager, accelerator, optimizer)
