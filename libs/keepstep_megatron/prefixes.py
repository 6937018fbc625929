"""Splitting state dicts by the kind of their leaves, and changing the keys of sharded leaves.

The names are those of Megatron Core's ``dist_checkpointing.utils``; ``keepstep.sharded.utils`` has them too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from keepstep_megatron.dict_utils import Nested, extract_matching_values, nested_values
from keepstep_megatron.mapping import (
    LocalNonpersistentObject,
    ShardedBase,
    ShardedStateDict,
    ShardedTensor,
    ShardedTensorFactory,
    StateDict,
)


def extract_sharded_tensors(sharded_state_dict: ShardedStateDict) -> tuple[ShardedStateDict, StateDict]:
    """Split a state dict into its ``ShardedTensor`` leaves and the others. Both keep the structure.

    Args:
        sharded_state_dict: nested dicts and lists; not changed.
    """
    return _split(sharded_state_dict, ShardedTensor)


def extract_sharded_tensors_and_factories(
    sharded_state_dict: ShardedStateDict,
) -> tuple[ShardedStateDict, StateDict]:
    """Split a state dict into its ``ShardedTensor`` and ``ShardedTensorFactory`` leaves and the others.

    Args:
        sharded_state_dict: nested dicts and lists; not changed.
    """
    return _split(sharded_state_dict, ShardedTensor, ShardedTensorFactory)


def extract_sharded_tensors_or_nonpersistent(
    sharded_state_dict: ShardedStateDict,
) -> tuple[ShardedStateDict, StateDict]:
    """Split a state dict into its tensors, factories and ``LocalNonpersistentObject`` leaves and the others.

    Args:
        sharded_state_dict: nested dicts and lists; not changed.
    """
    return _split(sharded_state_dict, ShardedTensor, ShardedTensorFactory, LocalNonpersistentObject)


def extract_sharded_base(sharded_state_dict: ShardedStateDict) -> tuple[ShardedStateDict, StateDict]:
    """Split a state dict into its ``ShardedBase`` leaves and the others. Both keep the structure.

    Args:
        sharded_state_dict: nested dicts and lists; not changed.
    """
    return _split(sharded_state_dict, ShardedBase)


def extract_nonpersistent(sharded_state_dict: ShardedStateDict) -> tuple[ShardedStateDict, StateDict]:
    """Split a state dict into its ``LocalNonpersistentObject`` leaves and the others. Both keep the structure.

    Args:
        sharded_state_dict: nested dicts and lists; not changed.
    """
    return _split(sharded_state_dict, LocalNonpersistentObject)


def _split(state: Nested, *kinds: type) -> tuple[ShardedStateDict, StateDict]:
    return extract_matching_values(state, lambda leaf: isinstance(leaf, kinds))


def add_prefix_for_sharding(sharded_state_dict: ShardedStateDict, prefix: str) -> None:
    """Put a prefix before the key of every sharded leaf, in place. A leaf at two places gets it once.

    Args:
        sharded_state_dict: nested dicts and lists; its leaves are changed.
        prefix: put before each key, as it is.
    """
    _rename(sharded_state_dict, lambda key: prefix + key)


def replace_prefix_for_sharding(sharded_state_dict: ShardedStateDict, old_prefix: str, new_prefix: str) -> None:
    """Replace the prefix of the key of every sharded leaf, in place.

    Args:
        sharded_state_dict: nested dicts and lists; its leaves are changed.
        old_prefix: beginning of every key.
        new_prefix: replaces it.

    Raises:
        ValueError: a key does not begin with ``old_prefix``. No key was changed.
    """

    def renamed(key: str) -> str:
        if not key.startswith(old_prefix):
            raise ValueError(
                f"key {key!r} does not begin with {old_prefix!r}: use apply_prefix_mapping to rename only some keys"
            )
        return new_prefix + key.removeprefix(old_prefix)

    _rename(sharded_state_dict, renamed)


def apply_prefix_mapping(sharded_state_dict: ShardedStateDict, prefix_map: Mapping[str, str]) -> None:
    """Replace the prefixes of those sharded leaves whose keys begin with one of them, in place.

    Args:
        sharded_state_dict: nested dicts and lists; its leaves are changed.
        prefix_map: new prefix for each old one. The first that fits a key is used.
    """

    def renamed(key: str) -> str:
        old = next((prefix for prefix in prefix_map if key.startswith(prefix)), None)
        return key if old is None else prefix_map[old] + key.removeprefix(old)

    _rename(sharded_state_dict, renamed)


def _rename(state: Nested, renamed: Callable[[str], str]) -> None:
    """Change the keys of all sharded leaves, each leaf once, or none if one of them is refused."""
    leaves = {id(leaf): leaf for leaf in nested_values(state) if isinstance(leaf, ShardedBase)}
    keys = [renamed(leaf.key) for leaf in leaves.values()]
    for leaf, key in zip(leaves.values(), keys, strict=True):
        leaf.key = key
