"""Parts that several ranks hold are written by one of them each, and all ranks write about as much."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.sharded import ShardedObject, ShardedTensor
from keepstep.sharded.dict_utils import nested_values
from keepstep_megatron.distribution import distribute_shards_to_ranks, saving_ranks, with_saving_ranks


@settings(max_examples=30)
@given(
    st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.sets(st.integers(0, 3), min_size=1), st.integers(0, 99)))
)
def test_a_part_is_assigned_to_a_rank_that_holds_it_whatever_the_order(parts) -> None:
    holders = {name: sorted(ranks) for name, (ranks, _) in parts.items()}
    sizes = {name: size for name, (_, size) in parts.items()}
    assigned = distribute_shards_to_ranks(holders, sizes, 4)
    assert assigned.keys() == parts.keys()
    assert all(rank in holders[name] for name, rank in assigned.items())
    backwards = {name: ranks[::-1] for name, ranks in reversed(holders.items())}
    assert distribute_shards_to_ranks(backwards, sizes, 4) == assigned


def test_equal_replicas_are_spread_evenly_and_parts_of_one_rank_come_first() -> None:
    holders = {"mine": [0], "a": [0, 1], "b": [0, 1], "c": [0, 1]}
    assert distribute_shards_to_ranks(holders, {"mine": 50, "a": 40, "b": 30, "c": 20}, 2) == {
        "mine": 0,
        "a": 1,
        "b": 1,
        "c": 0,
    }


def state(rank):
    """Two replicated tensors, a range of another, and an object, as rank 0 or 1 of a data-parallel group has them."""
    whole = {name: ShardedTensor.from_rank_offsets(name, torch.zeros(4), replica_id=(0, rank)) for name in "ab"}
    flat = ShardedTensor.from_rank_offsets_flat(
        "f", torch.zeros(2), (4,), flattened_range=slice(2 * rank, 2 * rank + 2)
    )
    elsewhere = ShardedTensor.from_rank_offsets("e", torch.zeros(4), replica_id=(1, rank))
    return {"model": [whole, flat, elsewhere], "rng": ShardedObject("rng", 0, (1,), (0,), rank)}


def tensors(rank):
    return [leaf for leaf in nested_values(state(rank)) if isinstance(leaf, ShardedTensor)]


def test_each_part_has_one_main_replica_after_the_distribution() -> None:
    ranks = saving_ranks([tensors(0), tensors(1)])
    changed = [with_saving_ranks(state(rank), ranks, rank) for rank in (0, 1)]
    mains = [{leaf.key for leaf in nested_values(one) if leaf.replica_id == 0} for one in changed]
    assert mains == [{"a", "f", "rng"}, {"b", "f"}]
    assert {leaf.key for leaf in nested_values(changed[0]) if leaf.replica_id == (1, 0)} == {"e"}, "of another group"
    assert all(leaf.replica_id in {(0, 1), (1, 1), 0} for leaf in tensors(1)), "the state of the caller was changed"


@pytest.mark.parametrize("order", [1, -1])
def test_every_rank_computes_the_same(order) -> None:
    expected = {("a", (0,), ()): 0, ("b", (0,), ()): 1, ("f", (0,), (0, 2)): 0, ("f", (0,), (2, 4)): 1}
    assert saving_ranks([tensors(0)[::order], tensors(1)[::order]]) == expected
