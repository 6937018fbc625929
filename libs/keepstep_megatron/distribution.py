"""Which rank writes a part that several ranks hold, so that all of them write about as much. Pure.

Rules:

* Parts whose main replica is in the group are assigned first, then parts that few ranks hold, then large ones, then in
  the order of their names.
* Each goes to the rank with the fewest bytes so far; of equal ranks, to the lowest.
* Every rank computes the same assignment from the parts of all ranks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

from keepstep_megatron.dict_utils import Nested, nested_values
from keepstep_megatron.mapping import ShardedTensor, is_main_replica

ShardId: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Key, offset, and ``flattened_range`` as (start, stop) or ()."""
Part = TypeVar("Part")


def shard_id(tensor: ShardedTensor) -> ShardId:
    """Return what all replicas of a part have in common, and no other part has."""
    part = tensor.flattened_range
    return tensor.key, tensor.global_offset, () if part is None else (part.start, part.stop)


class ShardDistribution(NamedTuple):
    """An assignment of the parts of a group. Every rank of the group has the same."""

    main_rank_for_shard: dict[ShardId, int]
    """Rank of the group that writes or reads a part."""
    shards_in_this_group: set[ShardId]
    """The parts that are assigned."""
    shard_to_metadata: dict[ShardId, ShardedTensor]
    """Every part that a rank of the group holds, as its assigned rank or else the first of them has it, without
    data."""
    all_ranks_for_shard: dict[ShardId, list[int]]
    """Ranks of the group that hold a part, in ascending order."""


def distribute_shards_to_ranks(
    shard_to_ranks: Mapping[Part, Collection[int]],
    shard_to_size: Mapping[Part, int],
    num_ranks: int,
    cross_parallelization_group_loads: Collection[Part] = (),
) -> dict[Part, int]:
    """Assign each part to one of the ranks that hold it.

    Args:
        shard_to_ranks: ranks that hold each part, at least one. Parts can be ordered.
        shard_to_size: bytes of each part.
        num_ranks: number of ranks.
        cross_parallelization_group_loads: parts whose main replica is in another group.

    Returns:
        The rank of each part.
    """
    load = [0] * num_ranks
    assigned: dict[Part, int] = {}
    elsewhere = set(cross_parallelization_group_loads)
    order: Any = lambda part: (part in elsewhere, len(shard_to_ranks[part]), -shard_to_size[part], part)  # noqa: E731
    for part in sorted(shard_to_ranks, key=order):
        rank = min(shard_to_ranks[part], key=lambda one: (load[one], one))
        assigned[part] = rank
        load[rank] += shard_to_size[part]
    return assigned


def distribution_of(
    tensors_of_ranks: Sequence[Collection[ShardedTensor]],
    *,
    ignore_groups: bool = False,
    stored: Sequence[Collection[ShardId]] | None = None,
) -> ShardDistribution:
    """Assign the parts of a group.

    Args:
        tensors_of_ranks: for each rank of the group, its tensors; their data is not used.
        ignore_groups: assign all parts, as for a load. Default: those whose main replica is in the group, because
            another group saves the others.
        stored: for each rank of the group, the parts that it can be assigned to. Default: all that it holds.
    """
    holders: dict[ShardId, dict[int, ShardedTensor]] = {}
    mains = set[ShardId]()
    for rank, tensors in enumerate(tensors_of_ranks):
        for tensor in tensors:
            part = shard_id(tensor)
            holders.setdefault(part, {}).setdefault(rank, tensor)
            if is_main_replica(tensor.replica_id):
                mains.add(part)
    ranks = {part: list(found) for part, found in holders.items()}
    parts = set(holders) if ignore_groups else mains
    sizes = {part: next(iter(holders[part].values())).nbytes for part in parts}
    able = ranks
    if stored is not None:
        able = {part: [rank for rank in found if part in stored[rank]] for part, found in ranks.items()}
    held = {part: able[part] for part in parts if able[part]}
    assigned = distribute_shards_to_ranks(held, sizes, len(tensors_of_ranks), parts - mains)
    metadata = {part: found[assigned.get(part, ranks[part][0])] for part, found in holders.items()}
    return ShardDistribution(assigned, set(assigned), metadata, ranks)


def rounds_of(parts: Iterable[Part], sizes: Mapping[Part, int], round_bytes: int) -> Iterator[tuple[Part, ...]]:
    """Yield the parts that a rank sends in each round, in their order.

    Args:
        parts: what it sends.
        sizes: bytes of each part.
        round_bytes: limit of a round of several parts. A larger part has a round of its own.
    """
    batch: list[Part] = []
    total = 0
    for part in parts:
        if batch and total + sizes[part] > round_bytes:
            yield tuple(batch)
            batch, total = [], 0
        batch.append(part)
        total += sizes[part]
    if batch:
        yield tuple(batch)


def set_saving_ranks(sharded_part: Nested, distribution: ShardDistribution, rank: int) -> None:
    """Make the leaves of assigned parts main replicas on their rank only, in place. Other leaves keep their replica.

    Args:
        sharded_part: nested dicts and lists; its leaves are changed.
        distribution: from ``distribution_of``.
        rank: this rank, in the group.
    """
    for leaf in nested_values(sharded_part):
        writer = distribution.main_rank_for_shard.get(shard_id(leaf)) if isinstance(leaf, ShardedTensor) else None
        if writer is not None:
            leaf.replica_id = 0 if writer == rank else 1
