"""Keys of sharded leaves change together, each leaf once; leaves are split by their kind."""

from __future__ import annotations

import pytest
import torch

from keepstep.sharded import LocalNonpersistentObject, ShardedObject, ShardedTensor, ShardedTensorFactory
from keepstep.sharded.dict_utils import nested_values
from keepstep.sharded.prefixes import (
    add_prefix_for_sharding,
    apply_prefix_mapping,
    extract_nonpersistent,
    extract_sharded_base,
    extract_sharded_tensors,
    extract_sharded_tensors_and_factories,
    extract_sharded_tensors_or_nonpersistent,
    replace_prefix_for_sharding,
)

TENSOR, FACTORY, OBJECT, LOCAL, STEP = "tensor", "factory", "object", "local", "step"


def state():
    return {
        "layer": [
            {TENSOR: ShardedTensor.from_rank_offsets("layer.w", torch.zeros(2)), STEP: 7},
            {FACTORY: ShardedTensorFactory("layer.f", torch.zeros(2), dict, torch.cat)},
        ],
        OBJECT: ShardedObject("rng", None, (1,), (0,)),
        LOCAL: LocalNonpersistentObject(3),
    }


def keys(tree):
    return [leaf.key for leaf in nested_values(tree) if hasattr(leaf, "key")]


def names(tree):
    if not isinstance(tree, dict | list):
        return set()
    items = list(tree.items() if isinstance(tree, dict) else enumerate(tree))
    return {name for name, value in items if not isinstance(value, dict | list)}.union(
        *(names(value) for _, value in items)
    )


@pytest.mark.parametrize(
    ("extract", "chosen"),
    [
        (extract_sharded_tensors, {TENSOR}),
        (extract_sharded_tensors_and_factories, {TENSOR, FACTORY}),
        (extract_sharded_tensors_or_nonpersistent, {TENSOR, FACTORY, LOCAL}),
        (extract_sharded_base, {TENSOR, FACTORY, OBJECT}),
        (extract_nonpersistent, {LOCAL}),
    ],
)
def test_leaves_are_split_by_kind(extract, chosen) -> None:
    found, others = extract(state())
    assert names(found) == chosen
    assert names(others) == {TENSOR, FACTORY, OBJECT, LOCAL, STEP} - chosen


def test_a_prefix_is_put_before_every_key_once() -> None:
    tied = state()
    tied["again"] = tied["layer"][0][TENSOR]
    add_prefix_for_sharding(tied, "model.")
    assert keys(tied) == ["model.layer.w", "model.layer.f", "model.rng", "model.layer.w"]


def test_a_prefix_is_replaced_in_all_keys_or_none() -> None:
    model = state()
    with pytest.raises(ValueError, match=r"key 'rng' does not begin with 'layer\.'.*apply_prefix_mapping"):
        replace_prefix_for_sharding(model, "layer.", "decoder.")
    assert keys(model) == ["layer.w", "layer.f", "rng"], "some keys were changed"
    replace_prefix_for_sharding(model["layer"], "layer.", "decoder.")
    assert keys(model) == ["decoder.w", "decoder.f", "rng"]


def test_a_mapping_renames_the_keys_that_fit_with_its_first_prefix() -> None:
    model = state()
    apply_prefix_mapping(model, {"layer.w": "first.", "layer.": "second.", "x": "y"})
    assert keys(model) == ["first.", "second.f", "rng"]
