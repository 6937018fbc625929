"""The parts of a sharded state that a save writes and a load asks for. The caller's state is not changed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from keepstep.sharded.dict_utils import dict_list_map_inplace, dict_list_map_outplace, extract_matching_values
from keepstep.sharded.mapping import (
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
    apply_factories,
)
from keepstep.sharded.prefixes import extract_nonpersistent, extract_sharded_base


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
    """Apply factories, leave local values out, and split the rest."""
    state = _copied(sharded_state_dict)
    apply_factories(state)
    _, state = extract_nonpersistent(state)
    sharded, common = extract_sharded_base(state)
    return SavedParts(_without_empty_ranges(sharded), common)


def parts_to_load(sharded_state_dict: ShardedStateDict) -> RequestedParts:
    """Apply factories, and split the state. Values without sharding are left out: the checkpoint has its own."""
    state = _without_empty_ranges(_copied(sharded_state_dict))
    factories, _ = extract_matching_values(
        state, lambda leaf: isinstance(leaf, ShardedTensorFactory), return_lists_as_dicts=True
    )
    apply_factories(state)
    dict_list_map_inplace(lambda factory: factory.without_data(), factories)
    nonpersistent, state = extract_nonpersistent(state)
    dict_list_map_inplace(lambda leaf: leaf.unwrap(), nonpersistent)
    sharded, _ = extract_sharded_base(state)
    return RequestedParts(_without_empty_ranges(sharded), nonpersistent, factories)


def _copied(state: ShardedStateDict) -> Any:
    """Return new dicts and lists with the same leaves."""
    return dict_list_map_outplace(lambda leaf: leaf, state)


def _without_empty_ranges(state: ShardedStateDict) -> Any:
    """Leave out flattened tensors of which this rank has no element."""
    _, rest = extract_matching_values(state, lambda leaf: isinstance(leaf, ShardedTensor) and _is_empty(leaf))
    return rest


def _is_empty(tensor: ShardedTensor) -> bool:
    part = tensor.flattened_range
    return part is not None and part.start == part.stop
