"""Which part of a global tensor or object each leaf of a state dict is.

Imported under the names that Megatron Core has in ``dist_checkpointing.mapping``.
"""

from __future__ import annotations

from keepstep_megatron.mapping.factories import (
    FactoryBuildFn,
    FactoryMergeFn,
    ShardedTensorFactory,
    apply_factories,
    apply_factory_merges,
)
from keepstep_megatron.mapping.nonpersistent import LocalNonpersistentObject, LocalNonpersitentObject
from keepstep_megatron.mapping.sharded_base import (
    CommonStateDict,
    ReplicaId,
    ShardedBase,
    ShardedStateDict,
    StateDict,
    is_main_replica,
)
from keepstep_megatron.mapping.sharded_object import ShardedObject
from keepstep_megatron.mapping.sharded_tensor import ShardedTensor

__all__ = [
    "CommonStateDict",
    "FactoryBuildFn",
    "FactoryMergeFn",
    "LocalNonpersistentObject",
    "LocalNonpersitentObject",
    "ReplicaId",
    "ShardedBase",
    "ShardedObject",
    "ShardedStateDict",
    "ShardedTensor",
    "ShardedTensorFactory",
    "StateDict",
    "apply_factories",
    "apply_factory_merges",
    "is_main_replica",
]
