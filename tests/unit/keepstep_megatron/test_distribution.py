"""Parts that several ranks hold are written by one of them each, and all ranks write about as much."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.sharded import CheckpointingException, FullyParallelSaveStrategyWrapper, ShardedObject, ShardedTensor
from keepstep.sharded.dict_utils import nested_values
from keepstep.sharded.strategies import NativeSaveStrategy
from keepstep_megatron.distribution import distribute_shards_to_ranks, distribution_of, rounds_of, set_saving_ranks


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


@given(st.dictionaries(st.integers(), st.integers(0, 9)), st.integers(0, 20))
def test_rounds_have_all_parts_in_order_and_as_many_as_fit(sizes, limit) -> None:
    rounds = list(rounds_of(sizes, sizes, limit))
    assert [part for one in rounds for part in one] == list(sizes)
    assert all(len(one) == 1 or sum(sizes[part] for part in one) <= limit for one in rounds)
    assert all(sum(map(sizes.get, one)) + sizes[then[0]] > limit for one, then in pairwise(rounds))


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
    found = distribution_of([tensors(0), tensors(1)])
    changed = [state(rank) for rank in (0, 1)]
    for rank, one in enumerate(changed):
        set_saving_ranks(one, found, rank)
    mains = [{leaf.key for leaf in nested_values(one) if leaf.replica_id == 0} for one in changed]
    assert mains == [{"a", "f", "rng"}, {"b", "f"}]
    assert {leaf.key for leaf in nested_values(changed[0]) if leaf.replica_id == (1, 0)} == {"e"}, "of another group"


@pytest.mark.parametrize("order", [1, -1])
def test_every_rank_computes_the_same(order) -> None:
    expected = {("a", (0,), ()): 0, ("b", (0,), ()): 1, ("f", (0,), (0, 2)): 0, ("f", (0,), (2, 4)): 1}
    found = distribution_of([tensors(0)[::order], tensors(1)[::order]])
    assert found.main_rank_for_shard == expected
    assert found.shards_in_this_group == set(expected)
    assert found.all_ranks_for_shard["e", (0,), ()] == [0, 1]


def test_a_load_assigns_parts_of_other_groups_last_and_only_to_ranks_that_store_them() -> None:
    found = distribution_of([tensors(0), tensors(1)], ignore_groups=True)
    assert found.main_rank_for_shard["e", (0,), ()] == 0, "both have read 24 bytes: the first of equal ranks"
    assert list(found.main_rank_for_shard)[-1] == ("e", (0,), ())
    stored = [{("a", (0,), ())}, {("e", (0,), ()), ("a", (0,), ())}]
    found = distribution_of([tensors(0), tensors(1)], ignore_groups=True, stored=stored)
    assert found.main_rank_for_shard == {("a", (0,), ()): 0, ("e", (0,), ()): 1}


def test_no_part_is_saved_by_another_rank_if_the_state_has_other_parts_than_the_kept_assignment() -> None:
    """The real strategies of one rank."""
    wrapper = FullyParallelSaveStrategyWrapper(NativeSaveStrategy(), do_cache_distribution=True)
    wrapper.apply_saving_parallelization(state(0))
    assert wrapper.cached_distribution is not None
    with pytest.raises(
        CheckpointingException, match=r"not the same parts as the first that was saved \('e' at \(0,\)\)"
    ):
        wrapper.apply_saving_parallelization({"model": state(0)["model"][:2]})
