"""Which rank writes a part that several ranks hold, so that all of them write about as much. Pure.

Rules:

* Parts that few ranks hold are assigned first, then large ones, then in the order of their names.
* Each goes to the rank with the fewest bytes so far; of equal ranks, to the lowest.
* Every rank computes the same assignment from the parts of all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

from keepstep_megatron.dict_utils import Nested, dict_list_map_outplace
from keepstep_megatron.mapping import ReplicaId, ShardedTensor, is_main_replica

ShardId: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Key, offset, and ``flattened_range`` as (start, stop) or ()."""
Part = TypeVar("Part")


def shard_id(tensor: ShardedTensor) -> ShardId:
    """Return what all replicas of a part have in common, and no other part has."""
    part = tensor.flattened_range
    return tensor.key, tensor.global_offset, () if part is None else (part.start, part.stop)


def distribute_shards_to_ranks(
    shard_to_ranks: Mapping[Part, Collection[int]], shard_to_size: Mapping[Part, int], num_ranks: int
) -> dict[Part, int]:
    """Assign each part to one of the ranks that hold it.

    Args:
        shard_to_ranks: ranks that hold each part, at least one. Parts can be ordered.
        shard_to_size: bytes of each part.
        num_ranks: number of ranks.

    Returns:
        The rank of each part.
    """
    load = [0] * num_ranks
    assigned: dict[Part, int] = {}
    order: Any = lambda part: (len(shard_to_ranks[part]), -shard_to_size[part], part)  # noqa: E731
    for part in sorted(shard_to_ranks, key=order):
        rank = min(shard_to_ranks[part], key=lambda one: (load[one], one))
        assigned[part] = rank
        load[rank] += shard_to_size[part]
    return assigned


def saving_ranks(tensors_of_ranks: Sequence[Collection[ShardedTensor]]) -> dict[ShardId, int]:
    """Return the rank that writes each part, for the parts whose main replica is in the group.

    Args:
        tensors_of_ranks: for each rank of the group, its tensors; their data is not used.
    """
    holders: dict[ShardId, set[int]] = {}
    sizes: dict[ShardId, int] = {}
    mains = set[ShardId]()
    for rank, tensors in enumerate(tensors_of_ranks):
        for tensor in tensors:
            part = shard_id(tensor)
            holders.setdefault(part, set()).add(rank)
            sizes[part] = tensor.nbytes
            if is_main_replica(tensor.replica_id):
                mains.add(part)
    return distribute_shards_to_ranks({part: holders[part] for part in mains}, sizes, len(tensors_of_ranks))


def with_saving_ranks(sharded_part: Nested, ranks: Mapping[ShardId, int], rank: int) -> Any:
    """Return the state with a main replica only where ``ranks`` has it.

    Args:
        sharded_part: nested dicts and lists; not changed.
        ranks: from ``saving_ranks``. Parts that it does not name keep their replica.
        rank: this rank, in the group.
    """

    def assigned(leaf: Any) -> Any:
        writer = ranks.get(shard_id(leaf)) if isinstance(leaf, ShardedTensor) else None
        if writer is None:
            return leaf
        number: ReplicaId = 0 if writer == rank else 1
        return replace(leaf, replica_id=number)

    return dict_list_map_outplace(assigned, sharded_part)
