"""Sharded state as in Megatron Core: the names of its ``dist_checkpointing``, in modules of the same names.

docs/sharded.md shows it in use.
"""

from __future__ import annotations

from keepstep.sharded.core import (
    CheckpointingConfig,
    CheckpointingException,
    check_is_distributed_checkpoint,
    maybe_load_config,
    save_config,
)
from keepstep.sharded.mapping import (
    LocalNonpersistentObject,
    LocalNonpersitentObject,
    ShardedBase,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    apply_factory_merges,
    is_main_replica,
)

__all__ = [
    "CheckpointingConfig",
    "CheckpointingException",
    "LocalNonpersistentObject",
    "LocalNonpersitentObject",
    "ShardedBase",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "apply_factories",
    "apply_factory_merges",
    "check_is_distributed_checkpoint",
    "is_main_replica",
    "maybe_load_config",
    "save_config",
]
