"""Which samples each rank of each replica group draws."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist
from torch.utils import data

T = TypeVar("T")


class DistributedSampler(data.distributed.DistributedSampler[T]):
    """A shard of ``dataset`` for one rank of one replica group.

    The shards are cut for ``num_replica_groups`` groups whether they are there or not: while a group is away its
    samples are not drawn, and nobody's shard moves when it comes back. The samples of a spare (``FIXED_WITH_SPARES``)
    are drawn and never trained on. For exact coverage draw batches by number: ``Manager.batches_committed()`` plus
    ``participating_rank()`` (docs/training.md).

    Args:
        dataset: anything with a length.
        replica_rank: number of this group, in [0, num_replica_groups). Not the quorum's, which changes.
        num_replica_groups: most groups that there will be.
        group_rank: rank within the group; default: of ``torch.distributed`` if it is initialised, else 0.
        num_replicas: ranks within the group; default: likewise, else 1.
        **kwargs: of ``torch.utils.data.distributed.DistributedSampler`` (shuffle, seed, drop_last).
    """

    def __init__(
        self,
        dataset: data.Dataset[T],
        replica_rank: int,
        num_replica_groups: int,
        group_rank: int | None = None,
        num_replicas: int | None = None,
        **kwargs: Any,
    ) -> None:
        initialised = dist.is_available() and dist.is_initialized()
        if group_rank is None:
            group_rank = dist.get_rank() if initialised else 0
        if num_replicas is None:
            num_replicas = dist.get_world_size() if initialised else 1
        if not 0 <= replica_rank < num_replica_groups:
            raise ValueError(f"replica_rank={replica_rank} must be in [0, num_replica_groups={num_replica_groups})")
        self.global_rank = group_rank + num_replicas * replica_rank
        self.global_world_size = num_replicas * num_replica_groups
        super().__init__(dataset, num_replicas=self.global_world_size, rank=self.global_rank, **kwargs)
