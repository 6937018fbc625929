"""The strategy of Lightning's Trainer for groups whose ranks share a model by FSDP2 and tensor parallelism."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

from torch.distributed.fsdp import FSDPModule

from keepstep.device_mesh import average_over_groups
from keepstep.integrations.lightning.group_strategy import GroupStrategy
from keepstep.integrations.lightning.lightning_modules import fabric_environments, strategies
from keepstep.integrations.lightning.relay_checkpoints import RelayCheckpointIO


class KeepstepModelParallelStrategy(GroupStrategy, strategies.ModelParallelStrategy):  # type: ignore[misc]
    """Trains with other replica groups, over whose ranks ``configure_model`` shards the model with ``fully_shard``.

    As ``KeepstepStrategy``, with several ranks in each group. ``trainer.world_size``, ``all_gather``, ``barrier`` and
    the device mesh are those of the group.

    Args:
        manager: as in ``KeepstepStrategy``.
        process_group: as in ``KeepstepStrategy``.
        save_once: as in ``KeepstepStrategy``.
        **kwargs: of ``ModelParallelStrategy``, such as ``data_parallel_size``.

    Raises:
        ValueError: no launcher has set the ranks. In ``fit``: more than one optimizer, ``sync_batchnorm``, a group
            without a number, ``RelayCheckpointIO``, or as ``average_over_groups``.
    """

    def __init__(
        self,
        manager: Mapping[str, Any] | None = None,
        process_group: Any = None,
        save_once: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(manager, process_group, save_once, **kwargs)
        if missing := [name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE") if name not in os.environ]:
            raise ValueError(
                f"the environment has no {', '.join(missing)}: start all ranks of a group with a launcher (keepstep "
                f"run --nproc-per-replica N, or torchrun)"
            )
        self.cluster_environment = fabric_environments.TorchElasticEnvironment()  # the ranks of the launcher

    def setup_environment(self) -> None:
        if isinstance(self.checkpoint_io, RelayCheckpointIO):
            raise ValueError(  # noqa: TRY004  as for other settings that do not fit
                "RelayCheckpointIO does not store checkpoints of several ranks: Lightning's ModelParallelStrategy "
                "writes them to a folder, and reads them, without the plugin; remove it, and store durable checkpoints "
                "at the relay (KEEPSTEP_DURABLE_EVERY), or call keepstep.checkpoint.save with the address of the relay"
            )
        super().setup_environment()
        self._make_manager()

    def _data_parallel(self) -> tuple[int, int]:
        mesh = self.device_mesh["data_parallel"]
        return mesh.get_local_rank(), mesh.size()

    # ---- model

    def _setup_evaluation(self, trainer: Any) -> None:
        strategies.ModelParallelStrategy.setup(self, trainer)

    def _average_gradients(self) -> None:
        average_over_groups(self.lightning_module, self.manager)

    @contextlib.contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Average the gradients of an accumulation once."""
        sharded = [one for one in self.lightning_module.modules() if isinstance(one, FSDPModule)]
        for one in sharded:
            one.set_requires_gradient_sync(False, recurse=False)
        try:
            yield
        finally:
            for one in sharded:
                one.set_requires_gradient_sync(True, recurse=False)

    # ---- checkpoints

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Load the shards of this rank. Lightning restores no optimizer of this strategy afterwards.

        Args:
            checkpoint_path: as in Lightning.
            weights_only: as in Lightning.
        """
        checkpoint: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)
        if self._fitting():
            self._load_step(checkpoint)
        return checkpoint


strategies.StrategyRegistry.register(
    "keepstep_model_parallel", KeepstepModelParallelStrategy, description="keepstep, with FSDP2 or TP in each group"
)
