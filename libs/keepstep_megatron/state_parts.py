"""The parts of a sharded state that a save writes and a load asks for. The caller's state is not changed."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Any

from keepstep.state.errors import UnsupportedValue
from keepstep_megatron.core import CheckpointingException
from keepstep_megatron.dict_utils import dict_list_map_inplace, dict_list_map_outplace, extract_matching_values
from keepstep_megatron.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
    apply_factories,
)
from keepstep_megatron.prefixes import extract_nonpersistent, extract_sharded_base


@dataclass(frozen=True)
class SavedParts:
    """Parts of a state that are saved."""

    sharded: ShardedStateDict
    """Tensors and objects."""
    common: StateDict
    """All other values."""


@dataclass(frozen=True)
class RequestedParts:
    """Parts of a state that are loaded."""

    sharded: ShardedStateDict
    """Tensors and objects."""
    nonpersistent: StateDict
    """Values of this rank that no checkpoint has."""
    factories: ShardedStateDict
    """Factories without data. Lists are dicts from positions to values."""


def parts_to_save(sharded_state_dict: ShardedStateDict) -> SavedParts:
    """Apply factories, leave local values out, and split the rest.

    Raises:
        CheckpointingException: a load could not put the parts together again.
        UnsupportedValue: the state is nested too deep, or contains itself.
    """
    try:
        state = _copied(sharded_state_dict)
    except RecursionError as error:
        raise UnsupportedValue(
            "the state is nested too deep, or contains itself: save a state that is flatter"
        ) from error
    apply_factories(state)
    _check_places(state)
    _, state = extract_nonpersistent(state)
    sharded, common = extract_sharded_base(state)
    own_leaves = dict_list_map_outplace(copy, without_empty_ranges(sharded))  # strategies may change their replicas
    return SavedParts(own_leaves, common)


def parts_to_load(sharded_state_dict: ShardedStateDict) -> RequestedParts:
    """Apply factories, and split the state. Values without sharding are left out: the checkpoint has its own."""
    state, nonpersistent, factories = load_preprocess(sharded_state_dict)
    sharded, _ = extract_sharded_base(state)
    return RequestedParts(sharded, nonpersistent, factories)


def load_preprocess(sharded_state_dict: ShardedStateDict) -> tuple[ShardedStateDict, StateDict, ShardedStateDict]:
    """Apply factories, and take out what no checkpoint has, as the first step of a load.

    Args:
        sharded_state_dict: nested dicts and lists; not changed.

    Returns:
        The rest of the state; the values of ``LocalNonpersistentObject``; and the factories without data, in which
        lists are dicts from positions to values.
    """
    state = _copied(sharded_state_dict)
    factories, _ = extract_matching_values(
        state, lambda leaf: isinstance(leaf, ShardedTensorFactory), return_lists_as_dicts=True
    )
    apply_factories(state)
    dict_list_map_inplace(lambda factory: factory.without_data(), factories)
    nonpersistent, state = extract_nonpersistent(state)
    dict_list_map_inplace(lambda leaf: leaf.unwrap(), nonpersistent)
    return state, nonpersistent, factories


def _check_places(state: ShardedStateDict) -> None:
    """Raise if the split loses positions of a list: each part has the values of its kind only, one after another."""
    if not isinstance(state, dict):
        raise CheckpointingException(f"cannot save a {type(state).__name__}: expected a dict")
    _kinds(state, ())


def _kinds(value: Any, path: tuple[Any, ...]) -> set[str]:
    """Return the parts that have a leaf of ``value``."""
    if not isinstance(value, dict | list) or not value:
        if is_empty_range(value):
            return set()
        is_local = isinstance(value, LocalNonpersistentObject)
        return {"sharded" if isinstance(value, ShardedBase) else "local" if is_local else "common"}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = [_kinds(item, (*path, place)) for place, item in items]
    kinds = set[str]().union(*found)
    if isinstance(value, list) and any(one and one != kinds for one in found):
        raise CheckpointingException(
            f"cannot save the list at {'.'.join(map(str, path))}: its values are of different kinds "
            f"({', '.join(sorted(kinds))}), and a load could not put them in order: use a dict"
        )
    return kinds


def _copied(state: ShardedStateDict) -> Any:
    """Return new dicts and lists with the same leaves."""
    return dict_list_map_outplace(lambda leaf: leaf, state)


def without_empty_ranges(state: ShardedStateDict) -> Any:
    """Return a state without flattened tensors of which this rank has no element."""
    _, rest = extract_matching_values(state, is_empty_range)
    return rest


def is_empty_range(leaf: Any) -> bool:
    """Return whether the leaf is a flattened tensor of which this rank has no element."""
    part = leaf.flattened_range if isinstance(leaf, ShardedTensor) else None
    return part is not None and part.start == part.stop
