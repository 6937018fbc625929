"""Sharded objects, factories, nonpersistent objects, and main replicas."""

from __future__ import annotations

import pytest
import torch

from keepstep.sharded import (
    CheckpointingException,
    LocalNonpersistentObject,
    LocalNonpersitentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    apply_factories,
    apply_factory_merges,
    is_main_replica,
)
from keepstep.sharded.dict_utils import dict_list_map_inplace, extract_matching_values


@pytest.mark.parametrize(
    ("replica_id", "is_main"), [(0, True), (1, False), ((0, 0), True), ((0, 1), False), ((), True), ([0], True)]
)
def test_zero_and_a_tuple_of_zeros_are_main_replicas(replica_id, is_main) -> None:
    assert is_main_replica(replica_id) is is_main


@pytest.mark.parametrize(
    ("shape", "offset", "name"),
    [((4,), (1,), "rng/shard_1_4"), ((2, 4), (0, 3), "rng/shard_0.3_2.4"), ((), (), "rng/shard__")],
)
def test_a_unique_key_names_the_element_and_is_read_back(shape, offset, name) -> None:
    element = ShardedObject("rng", {"seed": 1}, shape, offset, (0, 1))
    assert element.unique_key == name
    assert ShardedObject.empty_from_unique_key(name, (0, 1)) == element.without_data()


def test_a_key_may_have_slashes_and_an_old_key_no_last_size() -> None:
    assert ShardedObject.empty_from_unique_key("a/shard_0_1/b/shard_2_3").key == "a/shard_0_1/b"
    old = ShardedObject.empty_from_unique_key("te/shard_3.5_4")
    assert (old.global_shape, old.global_offset) == ((4, -1), (3, 5))


@pytest.mark.parametrize("text", ["rng", "rng/shard_1", "rng/shard_a_b", "rng/shard_1._2", "/shard_0_1"])
def test_another_text_is_no_unique_key(text) -> None:
    with pytest.raises(CheckpointingException, match="invalid unique key"):
        ShardedObject.empty_from_unique_key(text)


@pytest.mark.parametrize(("shape", "offset"), [((2,), (0, 0)), ((2,), (2,)), ((2,), (-1,)), ((0,), (0,))])
def test_an_element_outside_of_its_array_is_refused(shape, offset) -> None:
    with pytest.raises(CheckpointingException, match="ShardedObject 'rng' has global_offset"):
        ShardedObject("rng", None, shape, offset)


def test_both_spellings_are_one_class_and_give_the_value_back() -> None:
    assert LocalNonpersitentObject is LocalNonpersistentObject
    value = object()
    assert LocalNonpersistentObject(value).unwrap() is value


def halves(key, data, replica_id, flattened_range=None):
    return {
        "up": ShardedTensor.from_rank_offsets(f"{key}.up", data[:2], replica_id=replica_id),
        "down": [ShardedTensor.from_rank_offsets(f"{key}.down", data[2:], replica_id=replica_id)],
    }


def joined(parts):
    return torch.cat([parts["up"], *parts["down"]])


def state_with_factories():
    return {
        "layers": [
            {"fused": ShardedTensorFactory("a", torch.arange(4.0), halves, joined, 1), "step": 7},
            {"fused": ShardedTensorFactory("b", torch.arange(4.0, 8), halves, joined)},
        ]
    }


@pytest.mark.parametrize("as_dicts", [False, True])
def test_a_factory_becomes_several_leaves_and_one_value_again(as_dicts) -> None:
    state = state_with_factories()
    factories, _ = extract_matching_values(
        state, lambda leaf: isinstance(leaf, ShardedTensorFactory), return_lists_as_dicts=as_dicts
    )
    apply_factories(state)
    part = state["layers"][0]["fused"]["up"]
    assert (part.key, part.replica_id, part.data.tolist()) == ("a.up", 1, [0, 1])
    dict_list_map_inplace(lambda leaf: leaf.data if isinstance(leaf, ShardedTensor) else leaf, state)
    dict_list_map_inplace(ShardedTensorFactory.without_data, factories)
    assert apply_factory_merges(state, factories) is state
    assert [layer["fused"].tolist() for layer in state["layers"]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert state["layers"][0]["step"] == 7


def test_a_build_function_has_three_or_four_parameters() -> None:
    calls = []

    def three(key, data, replica_id):
        calls.append((key, data, replica_id))
        return {}

    def four(key, data, replica_id, flattened_range):
        calls.append((key, data, replica_id, flattened_range))
        return {}

    ShardedTensorFactory("w", None, three, joined, 2).build()
    ShardedTensorFactory("w", None, four, joined, 2).build()
    ShardedTensorFactory("w", None, four, joined, 2, slice(0, 1)).build()
    ShardedTensorFactory("w", None, lambda *values: calls.append(values), joined).build()
    assert calls == [("w", None, 2), ("w", None, 2, None), ("w", None, 2, slice(0, 1)), ("w", None, 0, None)]
    with pytest.raises(CheckpointingException, match=r"'w' has flattened_range .* three parameters"):
        ShardedTensorFactory("w", None, three, joined, 2, slice(0, 1)).build()


FACTORY = ShardedTensorFactory("w", None, halves, joined)


@pytest.mark.parametrize(
    ("loaded", "factories", "problem"),
    [
        ({"a": {}}, {"a": {"b": FACTORY}}, r"no key 'b' at \('a',\)"),
        ({"a": [1, 2]}, {"a": [FACTORY]}, r"list of 2 values at \('a',\), but the requested state has one of 1"),
        ({"a": [1]}, {"a": {1: FACTORY}}, r"invalid position 1 in a list of 1 values at \('a',\)"),
        ({"a": [1]}, {"a": {"0": FACTORY}}, "invalid position '0'"),
        ({"a": 1}, {"a": {"b": FACTORY}}, r"cannot merge a dict into a int at \('a',\)"),
    ],
)
def test_loaded_values_without_the_place_of_a_factory_are_refused(loaded, factories, problem) -> None:
    with pytest.raises(ValueError, match=problem):
        apply_factory_merges(loaded, factories)
