"""Public: the ``torch_dist`` format, under the names of Megatron Core."""

from keepstep.sharded.refused import refusing
from keepstep_megatron.strategies.torch_dist import (
    TorchDistLoadShardedStrategy,
    TorchDistSaveShardedStrategy,
)

__all__ = [
    "MCoreMetadata",
    "MCoreSavePlan",
    "TorchDistLoadShardedStrategy",
    "TorchDistSaveShardedStrategy",
    "register_default_torch_strategies",
]


class MCoreMetadata:
    """Named by ``.metadata`` files of Megatron Core 0.14 and 0.15."""


class MCoreSavePlan:
    """Named by ``.metadata`` files of Megatron Core."""


def register_default_torch_strategies() -> None:
    """Do nothing: the strategies are registered."""


_PLAN = "TorchDistSaveShardedStrategy plans its saves itself; subclass it, or SaveShardedStrategy, to change one"
_READ = "TorchDistLoadShardedStrategy reads a checkpoint itself; subclass it, or LoadShardedStrategy, to change a load"

__getattr__ = refusing(
    __name__,
    {
        "MCoreLoadPlanner": _READ,
        "MCoreSavePlanner": _PLAN,
        "MSC_PREFIX": "it does not use the Multi-Storage Client",
        "flatten_state_dict": "keepstep.sharded.dict_utils walks nested dicts",
        "mcore_to_pyt_state_dict": _PLAN,
        "sharded_tensor_to_torch_sharded_tensor": _PLAN,
        "_get_filesystem_reader": _READ,
        "_metadata_fn": _READ,
        "_replace_sharded_keys_with_state_dict_keys": _READ,
        "_replace_state_dict_keys_with_sharded_keys": _READ,
        "_restore_dict_types": _READ,
        "_unwrap_pyt_sharded_tensor": _READ,
    },
)
