"""Operations on nested dicts and lists keep every leaf, at its place."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from keepstep.sharded import ShardedObject
from keepstep.sharded.dict_utils import (
    dict_list_map_inplace,
    dict_list_map_outplace,
    dict_map,
    dict_map_with_key,
    diff,
    extract_matching_values,
    inspect_types,
    map_reduce,
    merge,
    nested_items_iter,
    nested_values,
)

LEAVES = st.integers(0, 9) | st.tuples(st.integers())
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
CONTAINERS = TREES.filter(lambda tree: isinstance(tree, dict | list))


def paths(tree, prefix=()):
    if not isinstance(tree, dict | list):
        return {prefix: tree}
    items = tree.items() if isinstance(tree, dict) else enumerate(tree)
    return {path: leaf for place, value in items for path, leaf in paths(value, (*prefix, place)).items()}


def is_even(leaf):
    return isinstance(leaf, int) and leaf % 2 == 0


@settings(max_examples=30)
@given(CONTAINERS)
def test_a_split_state_has_every_leaf_on_one_side_and_merges_again(tree) -> None:
    matching, others = extract_matching_values(tree, is_even, return_lists_as_dicts=True)
    assert paths(matching) == {path: leaf for path, leaf in paths(tree).items() if is_even(leaf)}
    assert paths(others) == {path: leaf for path, leaf in paths(tree).items() if not is_even(leaf)}
    merged = merge(dict_list_map_outplace(lambda leaf: leaf, matching), others)
    assert paths(merged) == paths(tree)


@settings(max_examples=30)
@given(CONTAINERS)
def test_a_split_keeps_lists_and_does_not_change_the_state(tree) -> None:
    copy = dict_list_map_outplace(lambda leaf: leaf, tree)
    matching, others = extract_matching_values(tree, is_even)
    assert tree == copy
    assert type(matching) is type(others) is type(tree)
    assert list(nested_values(matching)) == [leaf for leaf in nested_values(tree) if is_even(leaf)]
    assert list(nested_values(others)) == [leaf for leaf in nested_values(tree) if not is_even(leaf)]


@settings(max_examples=30)
@given(CONTAINERS)
def test_maps_replace_each_leaf_once(tree) -> None:
    doubled = dict_list_map_outplace(lambda leaf: [leaf, leaf], tree)
    expected = {(*path, position): leaf for path, leaf in paths(tree).items() for position in (0, 1)}
    assert paths(doubled) == expected
    in_place = dict_list_map_outplace(lambda leaf: leaf, tree)
    assert dict_list_map_inplace(lambda leaf: [leaf, leaf], in_place) is in_place
    assert in_place == doubled
    mapped = dict_list_map_outplace(lambda leaf: leaf, tree)
    dict_map(lambda leaf: [leaf, leaf], mapped)
    assert mapped == doubled
    dict_map_with_key(lambda place, leaf: (place, leaf), mapped)
    assert all(container[place] == (place, leaf[1]) for container, place, leaf in nested_items_iter(mapped))


def test_a_leaf_alone_is_mapped_but_not_split() -> None:
    assert dict_list_map_inplace(str, 1) == dict_list_map_outplace(str, 1) == "1"
    with pytest.raises(ValueError, match="a tuple: expected a dict or a list"):
        extract_matching_values((1,), is_even)


@settings(max_examples=30)
@given(TREES, TREES)
def test_a_comparison_of_equal_structures_is_empty_and_of_others_is_not(left, right) -> None:
    assert diff(left, left) == ([], [], [])
    only_left, only_right, mismatch = diff(left, right)
    assert bool(only_left or only_right or mismatch) == (left != right)
    mirrored = diff(right, left)
    assert (sorted(map(str, only_left)), sorted(map(str, only_right))) == tuple(
        sorted(map(str, one)) for one in (mirrored[1], mirrored[0])
    )


def test_a_comparison_names_the_whole_path() -> None:
    left = {"a": [1, {"x": 1}], "b": (1, 2), "c": 1.5}
    right = {"a": [1, {"y": 1}, 3], "b": [1, 2], "d": 0, "c": "1"}
    assert diff(left, right, ("root",)) == (
        [("root", "a", 1, "x")],
        [("root", "d"), ("root", "a", 2), ("root", "a", 1, "y")],
        [(("root", "b"), tuple, list), (("root", "c"), float, str)],
    )


@pytest.mark.parametrize(
    ("left", "right", "equal"),
    [
        (torch.ones(2), torch.ones(2), True),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), True),
        (torch.ones(2), torch.ones(1), False),
        (torch.ones(2), torch.zeros(2), False),
        (torch.ones(2), "text", False),
        (torch.ones(2, requires_grad=True), torch.ones(2), True),
        (np.ones(2), np.ones(2), True),
        (np.ones(2), np.zeros(2), False),
        (np.ones((2, 2)), np.ones((2, 2)), True),
        (np.array(1.0), np.array(1.0), True),
        (ShardedObject("k", 1, (1,), (0,)), ShardedObject("k", 1, (1,), (0,)), True),
        (ShardedObject("k", 1, (1,), (0,)), ShardedObject("k", 2, (1,), (0,)), False),
    ],
)
def test_tensors_arrays_and_sharded_leaves_are_compared_by_their_elements(left, right, equal) -> None:
    assert any(diff({"x": left}, {"x": right})) is not equal


def test_merging_refuses_two_values_at_one_place_with_its_path() -> None:
    assert merge({"a": {"x": 1}}, {"a": {"y": 2}, "b": 3}) == {"a": {"x": 1, "y": 2}, "b": 3}
    assert merge([{"x": 1}], [{"y": 2}]) == [{"x": 1, "y": 2}]
    with pytest.raises(ValueError, match=r"int into a int at \('a', 'x'\)"):
        merge({"a": {"x": 1}}, {"a": {"x": 1}})
    with pytest.raises(ValueError, match=r"lists of 1 and 2 values at \('a',\)"):
        merge({"a": [1]}, {"a": [1, 2]})


def test_values_are_grouped_in_the_order_of_their_keys() -> None:
    assert map_reduce([3, 1, 4, 1, 5], lambda x: x % 2, lambda x: x * 10, sum) == {1: 100, 0: 40}
    assert map_reduce("aba") == {"a": ["a", "a"], "b": ["b"]}


def test_types_are_printed_in_the_structure(capsys) -> None:
    inspect_types({"w": torch.zeros(2), "steps": [1, "x" * 40]})
    assert capsys.readouterr().out == (
        "\n> w: Tensor of shape torch.Size([2])\n> steps: \n"
        f"    - 0: [<class 'int'>]: 1\n    - 1: [<class 'str'>]: {'x' * 30}... (truncated)\n"
    )
