"""Public: the distribution of parts over ranks, under the names of Megatron Core."""

from keepstep.sharded.refused import refusing
from keepstep_megatron.distribution import distribute_shards_to_ranks

__all__ = ["distribute_shards_to_ranks"]

_LOAD = "FullyParallelLoadStrategyWrapper distributes the parts, and sends them to the ranks that want them"

__getattr__ = refusing(
    __name__,
    dict.fromkeys(
        (
            *("exchange_by_distribution", "exchange_loaded_objects_gather_object", "exchange_loaded_tensors_broadcast"),
            *("exchange_loaded_tensors_gather_object", "exchange_loaded_tensors_gather_rounds"),
            *("determine_main_replica_uniform_distribution", "ShardDistribution", "_get_empty_tensor_for_exchange"),
            "_shard_size",
        ),
        _LOAD,
    )
    | {"is_float8tensor": "it does not use Transformer Engine; dequantize its tensors before a save"},
)
