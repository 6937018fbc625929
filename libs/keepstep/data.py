"""Samplers and loaders: each rank of each replica group takes samples of its own."""

from __future__ import annotations

from typing import Any, TypeVar

import torch.distributed as dist
from torch.utils import data

from keepstep.elastic_data.elastic_loader import ElasticLoader
from keepstep.elastic_data.elastic_sampler import ElasticSampler

__all__ = ["DistributedSampler", "ElasticLoader", "ElasticSampler"]

T = TypeVar("T")


class DistributedSampler(data.distributed.DistributedSampler[T]):
    """Samples the shard of ``dataset`` that belongs to one rank of one replica group.

    The dataset is always divided into shards for ``num_replica_groups`` groups. While a group is away its samples are
    not drawn; the shards of the other groups do not change. Samples of a spare (``FIXED_WITH_SPARES``) are drawn and
    not trained on. ``ElasticSampler`` trains on every sample exactly once.

    Args:
        dataset: a dataset with a length.
        replica_rank: number of this group, in [0, num_replica_groups). It must not change while the job runs, unlike
            the group's rank in the quorum.
        num_replica_groups: largest number of groups in the job.
        group_rank: rank within the group; default: the rank in ``torch.distributed`` if initialized, else 0.
        num_replicas: number of ranks in the group; default: the world size of ``torch.distributed`` if initialized,
            else 1.
        **kwargs: of ``torch.utils.data.distributed.DistributedSampler`` (shuffle, seed, drop_last).

    Raises:
        ValueError: ``replica_rank`` is out of range.
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
        initialized = dist.is_available() and dist.is_initialized()
        if group_rank is None:
            group_rank = dist.get_rank() if initialized else 0
        if num_replicas is None:
            num_replicas = dist.get_world_size() if initialized else 1
        if not 0 <= replica_rank < num_replica_groups:
            raise ValueError(f"replica_rank={replica_rank} must be in [0, num_replica_groups={num_replica_groups})")
        self.global_rank = group_rank + num_replicas * replica_rank
        self.global_world_size = num_replicas * num_replica_groups
        super().__init__(dataset, num_replicas=self.global_world_size, rank=self.global_rank, **kwargs)
