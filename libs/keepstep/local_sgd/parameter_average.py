"""LocalSGD: average the parameters over the groups every few steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed import Work
from torch.optim import Optimizer

from keepstep.data_parallel.synced_buffers import SyncedBuffers
from keepstep.lifecycle.manager_like import as_manager
from keepstep.local_sgd.buckets import BUCKET_CAP_MB, allocate, size_in_bytes
from keepstep.local_sgd.layout import order_lines, parameter_lines, parameters_of_model
from keepstep.local_sgd.local_tensors import local_tensor
from keepstep.local_sgd.outer_steps import OuterSteps
from keepstep.local_sgd.schedule import Schedule

if TYPE_CHECKING:
    from keepstep.manager import Manager


class LocalSGD(OuterSteps):
    """Averages the parameters over the groups after every ``sync_every`` steps of the optimizer.

    Use it as a context manager around the training loop::

        with LocalSGD(manager, model, optimizer, sync_every=100):
            while manager.current_step() < outer_steps:
                optimizer.zero_grad()
                loss_fn(model(x), y).backward()
                optimizer.step()

    Each average is one step of the Manager. If it does not commit, the parameters stay as the group trained them, and
    the next average is ``sync_every`` steps later. Optimizer state is not averaged. A group that joins loads parameters
    and optimizer state of another group, both of which must be in the state registered with the Manager.

    Buffers are averaged or copied together with the parameters, as in ``DistributedDataParallel``.

    Args:
        manager: of this replica group. One Manager takes one LocalSGD; enter it again for each epoch.
        model: its trained parameters are averaged. Parameters that are DTensors are averaged shard by shard.
        optimizer: of torch, not a ``keepstep.Optimizer``. Its steps are counted; steps that a GradScaler skips are not.
        sync_every: steps between two averages; equal in all groups.
        sync_buffers: as in ``DistributedDataParallel``.

    Raises:
        ValueError: ``sync_every`` is below 1, the optimizer trains parameters that are not in the model, or a buffer
            cannot be synchronized.
        TypeError: the optimizer is a ``keepstep.Optimizer`` or one of Accelerate, or the model is a
            ``keepstep.DistributedDataParallel``.
    """

    def __init__(
        self, manager: Manager, model: nn.Module, optimizer: Optimizer, sync_every: int, *, sync_buffers: bool = True
    ) -> None:
        manager = as_manager(manager)
        schedule = Schedule(sync_every)
        parameters = parameters_of_model(model, optimizer)
        self._buffers = SyncedBuffers(manager, model, sync=sync_buffers, average=(), ignore=())
        super().__init__(manager, optimizer, parameters.values(), schedule, frozenset())
        self._averages: list[torch.Tensor] = []
        self._works: list[Work] = []
        lines = [f"LocalSGD sync_every {sync_every}", *parameter_lines(parameters), *self._buffers.lines]
        manager.steps.add_layout([*lines, *order_lines(optimizer, parameters)])

    def sync(self) -> bool:
        """Average now, and begin a new period. Call it in all groups, after the same number of steps.

        Returns:
            Whether the average committed. False also if this group has healed from one that is earlier in its period.
        """
        self.begin()
        self._schedule.skip_to_begin()
        self._start_quorum()
        if not self._schedule.begins:
            self._manager.steps.cancel()
            return False
        fragment = self._schedule.begin(self._manager.current_step())
        self._start(fragment)
        return self._end(fragment)

    @torch.no_grad()
    def _start(self, fragment: int) -> None:  # noqa: ARG002  one fragment
        local = [local_tensor(parameter) for parameter in self._parameters]
        reduced, self._averages = allocate(local, size_in_bytes(BUCKET_CAP_MB))
        for average, now in zip(self._averages, local, strict=True):
            average.copy_(now)
        self._buffers.start()
        self._works = [self._manager.allreduce(one) for one in reduced]

    def _finish(self, fragment: int) -> bool:
        try:
            for work in self._works:
                work.wait()
            with self._manager.committing() as committed, torch.no_grad():
                if committed:
                    for parameter, average in zip(self._parameters, self._averages, strict=True):
                        local_tensor(parameter).copy_(average)
        finally:
            self._abandon(fragment)
        return committed

    def _abandon(self, fragment: int) -> None:  # noqa: ARG002
        self._averages, self._works = [], []
