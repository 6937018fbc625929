"""Sharded state as in Megatron Core: the names of its ``dist_checkpointing``, in modules of the same names.

docs/sharded.md shows it in use.
"""

from __future__ import annotations

from keepstep_megatron.core import (
    CheckpointingConfig,
    CheckpointingException,
    check_is_distributed_checkpoint,
    maybe_load_config,
    save_config,
)
from keepstep_megatron.mapping import (
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
from keepstep_megatron.serialization import (
    load,
    load_common_state_dict,
    load_content_metadata,
    load_plain_tensors,
    load_sharded_metadata,
    load_sharded_objects,
    load_tensors_metadata,
    remove_sharded_tensors,
    save,
    validate_sharding_integrity,
)
from keepstep_megatron.strategies import (
    AsyncCallsQueue,
    AsyncRequest,
    FullyParallelLoadStrategyWrapper,
    FullyParallelSaveStrategyWrapper,
)
from keepstep_megatron.validation import StrictHandling

__all__ = [
    "AsyncCallsQueue",
    "AsyncRequest",
    "CheckpointingConfig",
    "CheckpointingException",
    "FullyParallelLoadStrategyWrapper",
    "FullyParallelSaveStrategyWrapper",
    "LocalNonpersistentObject",
    "LocalNonpersitentObject",
    "ShardedBase",
    "ShardedObject",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StrictHandling",
    "apply_factories",
    "apply_factory_merges",
    "check_is_distributed_checkpoint",
    "is_main_replica",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_sharded_objects",
    "load_tensors_metadata",
    "maybe_load_config",
    "remove_sharded_tensors",
    "save",
    "save_config",
    "validate_sharding_integrity",
]
