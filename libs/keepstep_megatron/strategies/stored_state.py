"""A stored checkpoint of any format, and the load of sharded leaves from it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast

import torch

from keepstep.state.errors import without_keys
from keepstep_megatron.core import CheckpointingException
from keepstep_megatron.dict_utils import dict_list_map_outplace, nested_values
from keepstep_megatron.mapping import ShardedObject, ShardedStateDict, ShardedTensor, StateDict
from keepstep_megatron.pieces import pieces_of
from keepstep_megatron.strategies.interfaces import CheckpointDir, LoadShardedStrategy, ShardedMetadata
from keepstep_mesh.protocol.boxes import Box, Sizes, whole

COMMON_STATE_KEY = "common_state/shard_0_1"
"""The object that holds the values without sharding, in formats that have no file of its own for them."""


@dataclass(frozen=True)
class StoredTensorFacts:
    """A tensor of a checkpoint."""

    dtype: torch.dtype
    shape: Sizes


@dataclass(frozen=True)
class Destination:
    """A box of a stored tensor, and the memory that it is loaded into."""

    key: str
    box: Box
    memory: torch.Tensor


class StoredState(Protocol):
    """The tensors and objects of one checkpoint."""

    @property
    def tensors(self) -> Mapping[str, StoredTensorFacts]:
        """The tensors, by key."""

    @property
    def objects(self) -> tuple[str, ...]:
        """Unique keys of the objects."""

    def read(self, destinations: list[Destination]) -> None:
        """Load boxes into memory, and convert them to its dtype. Raises an error that names file and key."""

    def value(self, unique_key: str) -> Any:
        """Return the value of an object."""


Opened = Callable[[CheckpointDir], AbstractContextManager[StoredState]]


class StoredLoadStrategy(LoadShardedStrategy):
    """Loads from a ``StoredState``."""

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True."""
        return True

    @abstractmethod
    def open(self, checkpoint_dir: CheckpointDir) -> AbstractContextManager[StoredState]:
        """Open a checkpoint."""

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: CheckpointDir) -> StateDict:
        """See ``LoadShardedStrategy``.

        Raises:
            CheckpointingException: the checkpoint does not have a key, or has a tensor of another shape.
        """
        with self.open(checkpoint_dir) as stored:
            return load_leaves(sharded_state_dict, stored)

    def load_tensors_metadata(self, checkpoint_dir: CheckpointDir) -> ShardedMetadata:
        """See ``LoadShardedStrategy``."""
        with self.open(checkpoint_dir) as stored:
            return dict(_tensors(stored))

    def load_sharded_metadata(self, checkpoint_dir: CheckpointDir) -> ShardedMetadata:
        """See ``LoadShardedStrategy``."""
        with self.open(checkpoint_dir) as stored:
            keys = [key for key in stored.objects if key != COMMON_STATE_KEY and is_unique_key(key)]
            found: ShardedMetadata = {key: ShardedObject.empty_from_unique_key(key) for key in keys}
            return {**found, **dict(_tensors(stored))}


def is_unique_key(key: str) -> bool:
    """Return whether a key is that of a ``ShardedObject``. Other values are of a state that was not sharded."""
    try:
        ShardedObject.empty_from_unique_key(key)
    except CheckpointingException:
        return False
    return True


def _tensors(stored: StoredState) -> Iterator[tuple[str, ShardedTensor]]:
    for key, facts in stored.tensors.items():
        whole_tensor = torch.empty(facts.shape, dtype=facts.dtype, device="meta")
        yield key, ShardedTensor.from_rank_offsets(key, whole_tensor).without_data()


def common_object(values: StateDict, replica_id: int) -> ShardedObject:
    """Return the object that holds the values without sharding."""
    return ShardedObject("common_state", values, (1,), (0,), replica_id)


def load_leaves(sharded_state_dict: ShardedStateDict, stored: StoredState) -> StateDict:
    """Return the structure of ``sharded_state_dict`` with loaded values. See ``LoadShardedStrategy.load``."""
    leaves = list(nested_values(sharded_state_dict))
    _check_present(leaves, stored)
    loaded: dict[int, Any] = {}
    destinations: list[Destination] = []
    for leaf in leaves:
        if isinstance(leaf, ShardedTensor):
            target = _with_memory(leaf, stored.tensors[leaf.key])
            loaded[id(leaf)] = target.data
            destinations += _destinations(target, stored.tensors[leaf.key].shape)
    stored.read(destinations)
    for leaf in leaves:
        if isinstance(leaf, ShardedObject):
            loaded[id(leaf)] = stored.value(leaf.unique_key)
    return cast("StateDict", dict_list_map_outplace(lambda leaf: loaded[id(leaf)], sharded_state_dict))


def _check_present(leaves: list[Any], stored: StoredState) -> None:
    objects = set(stored.objects)
    missing = []
    for leaf in leaves:
        key = leaf.unique_key if isinstance(leaf, ShardedObject) else leaf.key
        if key not in (objects if isinstance(leaf, ShardedObject) else stored.tensors):
            missing.append(key)
    if missing:
        available = [*stored.tensors, *stored.objects]
        raise CheckpointingException(
            f"{without_keys(missing, available)}. StrictHandling says what a load does with such keys"
        )


def _with_memory(tensor: ShardedTensor, stored: StoredTensorFacts) -> ShardedTensor:
    """Return a copy of ``tensor`` that has memory, with zeros where the stored tensor may have no elements."""
    stored_shape = stored.shape
    if not torch.can_cast(stored.dtype, tensor.dtype):
        raise CheckpointingException(
            f"{tensor.key!r} is {stored.dtype} in the checkpoint, but {tensor.dtype} is requested, which would drop "
            f"parts of its numbers: request {stored.dtype}"
        )
    differs = tensor.global_shape != stored_shape
    if differs and (not tensor.allow_shape_mismatch or len(tensor.global_shape) != len(stored_shape)):
        raise CheckpointingException(
            f"Global shape mismatch: {tensor.key!r} has shape {stored_shape} in the checkpoint, but "
            f"{tensor.global_shape} is requested: request that shape, or set allow_shape_mismatch if only padding "
            f"differs"
        )
    copy = replace(tensor, data=None if tensor.data is None else tensor.data.detach())
    copy.init_data("cpu")
    assert copy.data is not None
    if copy.data.is_meta:
        raise CheckpointingException(f"{tensor.key!r} has no memory (device meta): allocate it first, or set data=None")
    if tensor.allow_shape_mismatch:
        copy.data.zero_()
    return copy


def _destinations(target: ShardedTensor, stored_shape: Sizes) -> Iterator[Destination]:
    for box, memory in pieces_of(target):
        overlap = box.overlap(whole(stored_shape))
        if overlap is not None:
            yield Destination(target.key, overlap, memory[overlap.within(box)])
