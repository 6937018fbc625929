"""The strategy ``keepstep`` of Lightning's Trainer: one replica group of one process, in step with the other groups."""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from keepstep.ddp import DistributedDataParallel
from keepstep.integrations.lightning.group_strategy import GroupStrategy
from keepstep.integrations.lightning.lightning_modules import fabric_seed, strategies


class KeepstepStrategy(GroupStrategy, strategies.DDPStrategy):  # type: ignore[misc]  # its package may be missing
    """Trains with other replica groups, each of them a Trainer of one process with ``devices=1``.

    Weights, optimizer, schedulers, GradScaler, callbacks with a ``state_dict`` and the place in the training heal. Own
    state is registered with ``strategy.manager.register_state_dict_fn`` in ``on_fit_start``. Only in ``fit`` has the
    strategy a Manager.

    Args:
        manager: arguments of ``keepstep.Manager``, such as ``{"use_async_quorum": False}``.
        process_group: over the groups; default: that of the devices (NCCL on CUDA, XCCL on XPU, else Gloo).
        save_once: True: one group writes and removes checkpoints, in a folder that all groups share. False: every group
            does, in a folder of its own.
        **kwargs: of ``DDPStrategy``; all others are of ``keepstep.DistributedDataParallel``.

    Raises:
        ValueError: in ``fit``: more than one process, more than one optimizer, ``sync_batchnorm``, ``ddp_comm_hook``,
            or a group without a number.
    """

    # ---- this process is the whole group

    @property
    def global_rank(self) -> int:
        return 0

    @property
    def local_rank(self) -> int:
        return 0

    @property
    def node_rank(self) -> int:
        return 0

    @property
    def world_size(self) -> int:
        return 1

    def setup_distributed(self) -> None:
        processes = max(self.num_processes * self.num_nodes, int(os.environ.get("WORLD_SIZE", "1")))
        if processes > 1:
            raise ValueError(
                f"a group of {processes} processes: strategy='keepstep' trains one process a group; use "
                f"Trainer(devices=1, num_nodes=1), and start more groups (keepstep run --replicas {processes}); or "
                f"shard the model over the ranks of each group with KeepstepModelParallelStrategy"
            )
        fabric_seed.reset_seed()
        self.set_world_ranks()
        self._make_manager()

    # ---- model

    def _setup_evaluation(self, trainer: Any) -> None:
        self.accelerator.setup(trainer)
        self.precision_plugin.convert_module(self.model)
        self.model_to_device()
        self.setup_precision_plugin()

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(self.manager, model, **self._ddp_kwargs)

    def _register_ddp_hooks(self) -> None:
        """Register no hook: the Manager averages the gradients. ValueError if the script has one."""
        if self._ddp_comm_hook is not None:
            raise ValueError(
                "ddp_comm_hook has no effect: the Manager averages the gradients; remove it, or pass "
                "should_quantize=True to average values of 8 bits"
            )


strategies.StrategyRegistry.register(
    "keepstep", KeepstepStrategy, description="one of several replica groups, with fault tolerance for each step"
)
