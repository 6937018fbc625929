"""The steps of the checks of a load, as Megatron Core has them: each is called with leaves instead of descriptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import fields
from typing import Any, TypeAlias

import msgpack

from keepstep.state.values.leaves import TORCH_DTYPE_NAMES, TORCH_DTYPES
from keepstep_megatron.core import CheckpointingException
from keepstep_megatron.dict_utils import extract_matching_values, nested_values
from keepstep_megatron.mapping import ShardedBase, ShardedObject, ShardedStateDict, ShardedTensor
from keepstep_megatron.validation.integrity import check_integrity
from keepstep_megatron.validation.shard_rows import row_of
from keepstep_megatron.validation.strict_handling import KeyMismatch, StrictHandling, compare_keys, described
from keepstep_mesh.config.logging import get_logger

LocalMetadata: TypeAlias = list[ShardedTensor | ShardedObject]
GlobalMetadata: TypeAlias = list[LocalMetadata]
"""For each rank, its leaves."""

log = get_logger("keepstep.sharded")


def pack_leaves(sharded_state_dict: ShardedStateDict) -> bytes:
    """Return the sharded leaves of a rank, without data, as bytes.

    Args:
        sharded_state_dict: nested dicts and lists of sharded leaves.
    """
    packed: bytes = msgpack.packb([_fields(leaf) for leaf in nested_values(sharded_state_dict)])
    return packed


def _fields(leaf: ShardedBase) -> dict[str, Any]:
    if not isinstance(leaf, ShardedTensor | ShardedObject):
        raise CheckpointingException(f"cannot describe {leaf}: expected ShardedTensor or ShardedObject")
    found = {one.name: getattr(leaf, one.name) for one in fields(leaf) if one.name != "data"}
    if isinstance(leaf, ShardedTensor):
        part = leaf.flattened_range
        found |= {
            "dtype": TORCH_DTYPE_NAMES[leaf.dtype],
            "flattened_range": None if part is None else (part.start, part.stop),
        }
    return found


def unpack_leaves(data: bytes) -> LocalMetadata:
    """Read the leaves of another rank.

    Args:
        data: from ``pack_leaves``.
    """
    return [_leaf(found) for found in msgpack.unpackb(data, use_list=False)]


def _leaf(found: dict[str, Any]) -> ShardedTensor | ShardedObject:
    if "dtype" not in found:
        return ShardedObject(data=None, **found)
    part = found.pop("flattened_range")
    dtype = TORCH_DTYPES[found.pop("dtype")]
    return ShardedTensor(data=None, dtype=dtype, flattened_range=None if part is None else slice(*part), **found)


def check_leaves(global_metadata: GlobalMetadata) -> None:
    """Raise ``CheckpointingException`` if the main replicas of all ranks do not have each element exactly once.

    Args:
        global_metadata: for each rank, its leaves.
    """
    check_integrity([[row_of(leaf) for leaf in of_rank] for of_rank in global_metadata])


def validate_integrity_and_strict_load(
    sharded_state_dict: ShardedStateDict,
    strict: StrictHandling,
    validate_access_integrity: bool,
    local_metadata: Sequence[ShardedBase] | None = None,
    global_metadata: GlobalMetadata | None = None,
    ckpt_sharded_metadata: Mapping[str, ShardedBase] | None = None,
) -> tuple[ShardedStateDict, set[str], set[str]]:
    """Check a request before a load. It does not speak to other ranks.

    Args:
        sharded_state_dict: nested dicts and lists of sharded leaves.
        strict: what to do about keys that only one side has.
        validate_access_integrity: check ``global_metadata``, which is needed then.
        local_metadata: leaves that this rank requests. Default: those of ``sharded_state_dict``.
        global_metadata: for each rank, the leaves that it requests. None: missing keys are not found.
        ckpt_sharded_metadata: leaves of the checkpoint by key. Needed unless ``strict`` is ``ASSUME_OK_UNEXPECTED``.

    Returns:
        The request without unexpected keys, missing keys, and unexpected keys; see ``StrictHandling``.

    Raises:
        CheckpointingException: an argument is missing, the sharding is invalid, or ``strict`` forbids the keys.
    """
    keys = KeyMismatch()
    if StrictHandling.requires_explicit_ckpt_mismatch_check(strict):
        if ckpt_sharded_metadata is None:
            raise CheckpointingException(f"ckpt_sharded_metadata is None, but {strict} compares keys: pass the leaves")
        stored = {leaf.key for leaf in ckpt_sharded_metadata.values()}
        requested = [leaf.key for leaf in (local_metadata or nested_values(sharded_state_dict))]
        everyone = requested if global_metadata is None else [leaf.key for rank in global_metadata for leaf in rank]
        keys = compare_keys(strict, stored, requested, everyone)
        if global_metadata is None:
            keys = KeyMismatch(frozenset(), keys.unexpected, keys.error, keys.warning)
        if keys.error:
            raise CheckpointingException(keys.error)
        if keys.warning:
            log.warning(keys.warning)
        sharded_state_dict = adjust_non_strict_load(sharded_state_dict, keys.unexpected)
    if validate_access_integrity:
        if global_metadata is None:
            raise CheckpointingException("global_metadata is None: pass the leaves of all ranks to check the sharding")
        check_leaves(global_metadata)
    reported = StrictHandling.IGNORE_ALL is not strict
    return sharded_state_dict, set(keys.missing) if reported else set(), set(keys.unexpected) if reported else set()


def adjust_non_strict_load(
    sharded_state_dict: ShardedStateDict, sharded_keys_to_remove: AbstractSet[str]
) -> ShardedStateDict:
    """Return a state without the leaves of some keys.

    Args:
        sharded_state_dict: nested dicts and lists of sharded leaves; not changed.
        sharded_keys_to_remove: the keys.
    """
    _, kept = extract_matching_values(sharded_state_dict, lambda leaf: leaf.key in sharded_keys_to_remove)
    state: ShardedStateDict = kept
    return state


def maybe_report_missing_and_unexpected_keys(
    missing_keys: AbstractSet[str], unexpected_keys: AbstractSet[str], raise_error: bool = True
) -> None:
    """Report keys that only one side has.

    Args:
        missing_keys: in the checkpoint only.
        unexpected_keys: in the request only.
        raise_error: raise ``CheckpointingException``. False: log a warning.
    """
    text = described(missing_keys, unexpected_keys)
    if text and raise_error:
        raise CheckpointingException(text)
    if text:
        log.warning(text)


def validate_sharded_objects_handling(sharded_strategy: Any, common_strategy: Any) -> None:
    """Raise ``CheckpointingException`` if neither strategy handles ``ShardedObject``.

    Args:
        sharded_strategy: strategy of sharded leaves.
        common_strategy: strategy of the other values.
    """
    if not (sharded_strategy.can_handle_sharded_objects or common_strategy.can_handle_sharded_objects):
        raise CheckpointingException(
            f"Either sharded strategy or common strategy must implement ShardedObjects handling, but both "
            f"{sharded_strategy} and {common_strategy} have can_handle_sharded_objects=False"
        )
