"""Public: names of Megatron Core's tensors for torch.distributed.checkpoint, which keepstep refuses to make."""

from keepstep.sharded.refused import refusing

_TENSOR = "TorchDistSaveShardedStrategy writes a ShardedTensor as it is"

__getattr__ = refusing(__name__, dict.fromkeys(("CheckpointableShardedTensor", "LocalShardsContainer"), _TENSOR))
