"""Public: saves and loads whose work is spread over ranks, under the names of Megatron Core."""

from keepstep.sharded.refused import refusing
from keepstep_megatron.distribution import shard_id as _sharded_tensor_shard_id  # noqa: F401
from keepstep_megatron.strategies.fully_parallel import *  # noqa: F403

_WRAPPER = "FullyParallelSaveStrategyWrapper and FullyParallelLoadStrategyWrapper distribute the parts"

__getattr__ = refusing(
    __name__,
    dict.fromkeys(
        (
            "distribute_main_replicas_with_precomputed_distribution",
            "_defer_loading_sharded_items",
            "_fill_in_deferred_sharded_items",
        ),
        _WRAPPER,
    ),
)
