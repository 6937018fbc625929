"""Public: the distribution of parts over ranks, under the names of Megatron Core."""

from __future__ import annotations

import torch.distributed as dist

from keepstep.sharded.refused import refusing
from keepstep_megatron.dict_utils import nested_values
from keepstep_megatron.distribution import ShardDistribution, distribute_shards_to_ranks, distribution_of
from keepstep_megatron.mapping import ShardedStateDict
from keepstep_megatron.stages import TIMEOUT
from keepstep_megatron.strategies.fully_parallel import exchanged

__all__ = ["ShardDistribution", "determine_main_replica_uniform_distribution", "distribute_shards_to_ranks"]


def determine_main_replica_uniform_distribution(
    sharded_state_dict: ShardedStateDict,
    parallelization_group: dist.ProcessGroup | None,
    ignore_groups: bool = False,
) -> ShardDistribution | None:
    """Assign the parts of a group to its ranks. Every rank of the group calls it.

    Args:
        sharded_state_dict: nested dicts and lists of sharded leaves.
        parallelization_group: the ranks. None: all.
        ignore_groups: assign all parts, as for a load. Default: those whose main replica is in the group.

    Returns:
        The assignment; None: the group has one rank.

    Raises:
        CheckpointingException: a rank failed or was lost.
    """
    if not dist.is_initialized() or dist.get_world_size(parallelization_group) == 1:
        return None
    tensors = exchanged(nested_values(sharded_state_dict), parallelization_group, TIMEOUT)
    return distribution_of(tensors, ignore_groups=ignore_groups)


_LOAD = "FullyParallelLoadStrategyWrapper sends the parts that it has loaded to the ranks that want them"

__getattr__ = refusing(
    __name__,
    dict.fromkeys(
        (
            *("exchange_by_distribution", "exchange_loaded_objects_gather_object", "exchange_loaded_tensors_broadcast"),
            *("exchange_loaded_tensors_gather_object", "exchange_loaded_tensors_gather_rounds"),
            *("_get_empty_tensor_for_exchange", "_shard_size"),
        ),
        _LOAD,
    )
    | {"is_float8tensor": "it does not use Transformer Engine; dequantize its tensors before a save"},
)
