"""Save and load of sharded checkpoints: the names of Megatron Core's ``dist_checkpointing.serialization``."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

import msgpack
import torch.distributed as dist

from keepstep_megatron.dict_utils import dict_list_map_inplace, nested_values
from keepstep_megatron.mapping import CommonStateDict, ShardedObject, ShardedStateDict, StateDict
from keepstep_megatron.replicas import common_values, log_common_difference
from keepstep_megatron.sharded_load import Loaded, load, stored_leaves
from keepstep_megatron.sharded_save import CONTENT_METADATA_KEY, save
from keepstep_megatron.stages import Ranks
from keepstep_megatron.state_parts import parts_to_save
from keepstep_megatron.strategies.chosen import default_backend, get_default_strategy, load_strategies
from keepstep_megatron.strategies.interfaces import (
    CheckpointDir,
    LoadCommonStrategy,
    LoadShardedStrategy,
    SaveCommonStrategy,
    SaveShardedStrategy,
    ShardedMetadata,
    StrategyAction,
)
from keepstep_megatron.validation import check_leaves, pack_leaves, unpack_leaves
from keepstep_megatron.validation.leaf_checks import GlobalMetadata, LocalMetadata

__all__ = [
    "CkptShardedMetadata",
    "Loaded",
    "determine_global_metadata",
    "get_default_load_sharded_strategy",
    "get_default_save_common_strategy",
    "get_default_save_sharded_strategy",
    "load",
    "load_common_state_dict",
    "load_content_metadata",
    "load_plain_tensors",
    "load_sharded_metadata",
    "load_sharded_objects",
    "load_tensors_metadata",
    "remove_sharded_tensors",
    "save",
    "save_preprocess",
    "validate_sharding_integrity",
]

CkptShardedMetadata = ShardedMetadata
T = TypeVar("T")


def load_common_state_dict(checkpoint_dir: CheckpointDir) -> StateDict:
    """Return the values of a checkpoint that are not sharded.

    Args:
        checkpoint_dir: see ``save``.

    Raises:
        CheckpointingException: the checkpoint is not complete, or cannot be read.
    """
    return _alone(checkpoint_dir, lambda: load_strategies(checkpoint_dir).common.load_common(checkpoint_dir))


def load_tensors_metadata(
    checkpoint_dir: CheckpointDir, sharded_strategy: LoadShardedStrategy | tuple[str, int] | None = None
) -> ShardedMetadata:
    """Return the tensors of a checkpoint by key, each as one part without data.

    Args:
        checkpoint_dir: see ``save``.
        sharded_strategy: see ``load``.

    Raises:
        CheckpointingException: the checkpoint is not complete, or cannot be read.
    """

    def read() -> ShardedMetadata:
        return load_strategies(checkpoint_dir, sharded_strategy).sharded.load_tensors_metadata(checkpoint_dir)

    return _alone(checkpoint_dir, read)


def load_sharded_metadata(
    checkpoint_dir: CheckpointDir,
    sharded_strategy: LoadShardedStrategy | tuple[str, int] | None = None,
    common_strategy: LoadCommonStrategy | tuple[str, int] | None = None,
) -> ShardedMetadata:
    """Return the tensors of a checkpoint by key, and its objects by unique key, without data.

    Args:
        checkpoint_dir: see ``save``.
        sharded_strategy: see ``load``.
        common_strategy: see ``load``.

    Raises:
        CheckpointingException: the checkpoint is not complete, or cannot be read.
    """

    def read() -> ShardedMetadata:
        return stored_leaves(load_strategies(checkpoint_dir, sharded_strategy, common_strategy), checkpoint_dir)

    return _alone(checkpoint_dir, read)


def load_plain_tensors(checkpoint_dir: CheckpointDir) -> StateDict:
    """Return all tensors of a checkpoint by key, whole, in new memory of the CPU. One rank may call it alone.

    Args:
        checkpoint_dir: see ``save``.

    Raises:
        CheckpointingException: the checkpoint is not complete, or cannot be read.
    """

    def read() -> StateDict:
        with ExitStack() as opened:
            strategy = load_strategies(checkpoint_dir).opening_once(opened).sharded
            return strategy.load(dict(strategy.load_tensors_metadata(checkpoint_dir)), checkpoint_dir)

    return _alone(checkpoint_dir, read)


def load_sharded_objects(sharded_state_dict: ShardedStateDict, checkpoint_dir: CheckpointDir) -> ShardedStateDict:
    """Replace every ``ShardedObject`` by its value in a checkpoint, in place. One rank may call it alone.

    Args:
        sharded_state_dict: nested dicts and lists; changed.
        checkpoint_dir: see ``save``.

    Returns:
        ``sharded_state_dict``.

    Raises:
        CheckpointingException: the checkpoint is not complete, does not have an object, or cannot be read.
    """
    leaves = [leaf for leaf in nested_values(sharded_state_dict) if isinstance(leaf, ShardedObject)]
    wanted: StateDict = {leaf.unique_key: leaf for leaf in leaves}

    def read() -> StateDict:
        strategies = load_strategies(checkpoint_dir)
        if strategies.sharded.can_handle_sharded_objects:
            return strategies.sharded.load(wanted, checkpoint_dir)
        return strategies.common.load_sharded_objects(wanted, checkpoint_dir)

    found = _alone(checkpoint_dir, read)
    dict_list_map_inplace(
        lambda leaf: found[leaf.unique_key] if isinstance(leaf, ShardedObject) else leaf, sharded_state_dict
    )
    return sharded_state_dict


def load_content_metadata(
    checkpoint_dir: CheckpointDir | None = None, *, preloaded_state_dict: StateDict | None = None
) -> dict[str, Any] | None:
    """Return the ``content_metadata`` that was passed to ``save``; None: none was.

    Args:
        checkpoint_dir: see ``save``.
        preloaded_state_dict: the values without sharding, if they are loaded already.

    Raises:
        ValueError: both are None.
        CheckpointingException: the checkpoint is not complete, or cannot be read.
    """
    if preloaded_state_dict is None:
        if checkpoint_dir is None:
            raise ValueError("pass checkpoint_dir or preloaded_state_dict: both are None")
        preloaded_state_dict = load_common_state_dict(checkpoint_dir)
    return preloaded_state_dict.get(CONTENT_METADATA_KEY)


def remove_sharded_tensors(checkpoint_dir: CheckpointDir, key_prefix: str) -> None:
    """Remove tensors and objects from a checkpoint. One rank calls it. The values that stay are never damaged.

    Args:
        checkpoint_dir: see ``save``; of the format ``torch_dist``.
        key_prefix: beginning of their keys. If no key begins with it, a warning is logged.

    Raises:
        CheckpointingException: the checkpoint is of another format, which never changes, or cannot be read.
    """

    def remove() -> None:
        load_strategies(checkpoint_dir).sharded.remove_sharded_tensors(checkpoint_dir, key_prefix)

    _alone(checkpoint_dir, remove, "changed")


def determine_global_metadata(
    sharded_state_dict: ShardedStateDict, process_group: dist.ProcessGroup | None = None
) -> tuple[LocalMetadata, GlobalMetadata]:
    """Send the sharded leaves of every rank, without data, to all ranks. Every rank calls it.

    Args:
        sharded_state_dict: nested dicts and lists of sharded leaves.
        process_group: the ranks. Default: all.

    Returns:
        The leaves of this rank, and for each rank its leaves.

    Raises:
        CheckpointingException: a rank failed or was lost.
    """
    ranks = Ranks("the leaves of the ranks were not exchanged", group=process_group)
    found = [unpack_leaves(one) for one in ranks.stage(lambda: pack_leaves(sharded_state_dict))]
    return found[ranks.rank], found


def validate_sharding_integrity(
    global_metadata: GlobalMetadata, common_state_dict: CommonStateDict | None = None
) -> None:
    """Check that the main replicas of all ranks have each element of each value exactly once.

    Args:
        global_metadata: for each rank, its leaves; see ``determine_global_metadata``.
        common_state_dict: values without sharding. Those that differ from the ones of rank 0 are logged. Every rank
            passes them, or none.

    Raises:
        CheckpointingException: the main replicas do not; the error, on every rank, names key and chunk.
    """
    if common_state_dict is not None:
        ranks = Ranks("the values without sharding were not compared")
        packed = ranks.stage(lambda: msgpack.packb(common_values(common_state_dict)))
        log_common_difference([msgpack.unpackb(one) for one in packed], ranks.rank)
    check_leaves(global_metadata)


def save_preprocess(
    sharded_state_dict: ShardedStateDict,
    validate_access_integrity: bool = True,
    preprocess_common_before_consistancy_check: Callable[[CommonStateDict], StateDict] | None = None,
) -> tuple[ShardedStateDict, CommonStateDict]:
    """Apply factories, leave local values out, and split the rest, as the first step of a save.

    Args:
        sharded_state_dict: nested dicts and lists; not changed.
        validate_access_integrity: see ``save``. Every rank calls it then.
        preprocess_common_before_consistancy_check: see ``save``.

    Returns:
        The sharded leaves, and the values without sharding.

    Raises:
        CheckpointingException: the state is invalid.
    """
    parts = parts_to_save(sharded_state_dict)
    if validate_access_integrity:
        preprocess = preprocess_common_before_consistancy_check
        common = preprocess(parts.common) if preprocess is not None else parts.common
        validate_sharding_integrity(determine_global_metadata(parts.sharded)[1], common)
    return parts.sharded, parts.common


def get_default_save_sharded_strategy(backend: str | None = None, version: int = 1) -> SaveShardedStrategy:
    """Return the registered strategy that saves sharded leaves.

    Args:
        backend: its format. Default: that of saves that name none.
        version: of the format.
    """
    chosen = default_backend() if backend is None else (backend, version)
    strategy: SaveShardedStrategy = get_default_strategy(StrategyAction.SAVE_SHARDED, *chosen)
    return strategy


def get_default_save_common_strategy(backend: str = "torch", version: int = 1) -> SaveCommonStrategy:
    """Return the registered strategy that saves values without sharding.

    Args:
        backend: its format.
        version: of the format.
    """
    strategy: SaveCommonStrategy = get_default_strategy(StrategyAction.SAVE_COMMON, backend, version)
    return strategy


def get_default_load_sharded_strategy(checkpoint_dir: CheckpointDir) -> LoadShardedStrategy:
    """Return the strategy that loads the sharded leaves of a checkpoint.

    Args:
        checkpoint_dir: see ``save``.
    """
    return load_strategies(checkpoint_dir).sharded


def _alone(checkpoint_dir: CheckpointDir, act: Callable[[], T], done: str = "loaded") -> T:
    """Return what ``act`` returns. Every error becomes a ``CheckpointingException``."""
    found: list[T] = []
    Ranks(f"{checkpoint_dir} was not {done}", alone=True).stage(lambda: found.append(act()))
    return found[0]
