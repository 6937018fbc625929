"""A model and an optimizer of an ``Accelerator``, in step with the other groups.

A step that does not commit is for Accelerate a step whose gradients overflowed: ``optimizer_step_was_skipped`` is True,
and schedulers do not step.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType
from torch import nn
from torch.amp.grad_scaler import GradScaler

from keepstep.ddp import DistributedDataParallel
from keepstep.manager import Manager
from keepstep.optim import OptimizerWrapper


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


def check_single_process(accelerator: Accelerator) -> None:
    """Raise ValueError if Accelerate connects several processes, or spreads a model over devices."""
    if accelerator.distributed_type != DistributedType.NO:
        raise ValueError(
            f"Accelerate is set up for distributed_type={accelerator.distributed_type.value}: a replica group is one "
            f"process; start it with keepstep run or torchrun --nproc-per-node 1, not with accelerate launch, and "
            f"import keepstep.integrations.transformers before you make TrainingArguments or the Accelerator"
        )


def replace_optimizer(manager: Manager, accelerator: Accelerator, accelerated: AcceleratedOptimizer) -> GroupOptimizer:
    """Return the optimizer of the group, and let ``accelerator`` know it in place of ``accelerated``."""
    optimizer = GroupOptimizer(manager, accelerated)
    known = accelerator._optimizers  # noqa: SLF001  the list behind optimizer_step_was_skipped
    known[:] = [optimizer if one is accelerated else one for one in known]
    return optimizer


def replace_model(manager: Manager, accelerator: Accelerator, model: nn.Module, **kwargs: Any) -> nn.Module:
    """Return the model of the group, and let ``accelerator.no_sync`` and ``accumulate`` keep its gradients local.

    Each forward pass in training mode begins a step, if none is open.
    """

    def begin(module: nn.Module, _arguments: Any) -> None:
        if module.training and torch.is_grad_enabled() and manager.steps.open_number is None:
            manager.start_quorum()

    replicated = DistributedDataParallel(manager, model, **kwargs)
    replicated.register_forward_pre_hook(begin)
    accelerator.no_sync = lambda model: model.no_sync()
    return replicated


def prepare(
    accelerator: Accelerator, manager: Manager, model: nn.Module, optimizer: Any, **kwargs: Any
) -> tuple[nn.Module, GroupOptimizer]:
    """Put what ``accelerator.prepare`` returned in step with the other groups.

    The loop stays as it is: the first forward pass after a step begins the next one. Make and prepare schedulers with
    the optimizer that this returns. The state is registered with the Manager as ever.

    Args:
        accelerator: of this process, which is a whole group.
        manager: of this replica group.
        model: prepared.
        optimizer: prepared; one for each Manager.
        **kwargs: of ``keepstep.DistributedDataParallel``.

    Returns:
        The model and the optimizer for the loop.

    Raises:
        ValueError: Accelerate connects several processes.
    """
    check_single_process(accelerator)
    return replace_model(manager, accelerator, model, **kwargs), replace_optimizer(manager, accelerator, optimizer)
