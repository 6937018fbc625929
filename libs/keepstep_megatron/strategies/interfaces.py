"""Base classes of strategies that save and load sharded checkpoints."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from datetime import timedelta
from enum import Enum
from typing import TypeAlias

from keepstep_megatron.core import CheckpointingException
from keepstep_megatron.mapping import ShardedObject, ShardedStateDict, ShardedTensor, StateDict
from keepstep_megatron.stages import TIMEOUT
from keepstep_megatron.strategies.async_requests import AsyncRequest

CheckpointDir: TypeAlias = str | os.PathLike[str]
ShardedMetadata: TypeAlias = dict[str, ShardedTensor | ShardedObject]
"""Leaves of a checkpoint without data, by key; those of objects by unique key."""


class StrategyAction(Enum):
    """Action of a registered strategy."""

    LOAD_COMMON = "load_common"
    LOAD_SHARDED = "load_sharded"
    SAVE_COMMON = "save_common"
    SAVE_SHARDED = "save_sharded"


class LoadStrategyBase:
    """Base of strategies that load.

    Attributes:
        timeout: time limit of a load.
    """

    timeout: timedelta = TIMEOUT

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Whether it loads ``ShardedObject``."""
        return False

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Raise ``CheckpointingException`` if it cannot load a checkpoint of that backend. Default: it can.

        Called as ``check_backend_compatibility(backend)``, so that a subclass may name the parameter otherwise.
        """

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Raise ``CheckpointingException`` if it cannot load a checkpoint of that version. Default: it can."""


class SaveStrategyBase:
    """Base of strategies that save.

    Args:
        backend: format that it writes.
        version: of that format.

    Attributes:
        timeout: time limit of a save.
    """

    timeout: timedelta = TIMEOUT

    def __init__(self, backend: str, version: int) -> None:
        self.backend = backend
        self.version = version

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Whether it saves ``ShardedObject``."""
        return False

    def __str__(self) -> str:
        return f"{type(self).__name__}({self.backend}, {self.version})"


class LoadCommonStrategy(LoadStrategyBase, ABC):
    """Loads the part of a state without sharded leaves."""

    @abstractmethod
    def load_common(self, checkpoint_dir: CheckpointDir) -> StateDict:
        """Return that part."""

    def load_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: CheckpointDir
    ) -> StateDict:
        """Return the structure of ``sharded_objects_state_dict``, which has only objects, with loaded values."""
        raise CheckpointingException(
            f"{type(self).__name__} loads no ShardedObject from {checkpoint_dir}, but "
            f"{list(sharded_objects_state_dict)} has some: pass another strategy"
        )

    def load_sharded_metadata(self, checkpoint_dir: CheckpointDir) -> ShardedMetadata:
        """Return the objects of a checkpoint, without data."""
        if not self.can_handle_sharded_objects:
            return {}
        raise CheckpointingException(
            f"{type(self).__name__} does not list the ShardedObjects of {checkpoint_dir}: pass another strategy"
        )


class SaveCommonStrategy(SaveStrategyBase, ABC):
    """Saves the part of a state without sharded leaves."""

    @abstractmethod
    def save_common(self, common_state_dict: StateDict, checkpoint_dir: CheckpointDir) -> None:
        """Save that part, if this is rank 0. Every rank calls it."""

    def save_sharded_objects(self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: CheckpointDir) -> None:
        """Save the main replicas of ``sharded_objects_state_dict``, which has only objects."""
        raise CheckpointingException(
            f"{type(self).__name__} saves no ShardedObject to {checkpoint_dir}, but {list(sharded_objects_state_dict)} "
            f"has some: pass another strategy"
        )


class LoadShardedStrategy(LoadStrategyBase, ABC):
    """Loads sharded leaves."""

    @abstractmethod
    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: CheckpointDir) -> StateDict:
        """Return the structure of ``sharded_state_dict``, which has only sharded leaves, with loaded values.

        Tensors are loaded into ``data`` of their leaf, if it is set.
        """

    @abstractmethod
    def load_tensors_metadata(self, checkpoint_dir: CheckpointDir) -> ShardedMetadata:
        """Return the tensors of a checkpoint, each as one part without data."""

    def load_sharded_metadata(self, checkpoint_dir: CheckpointDir) -> ShardedMetadata:
        """Return the tensors and objects of a checkpoint, without data."""
        if not self.can_handle_sharded_objects:
            return self.load_tensors_metadata(checkpoint_dir)
        raise CheckpointingException(f"{type(self).__name__} does not list ShardedObjects: pass another strategy")

    def remove_sharded_tensors(self, checkpoint_dir: CheckpointDir, key_prefix: str) -> None:
        """Remove the tensors whose key begins with ``key_prefix``."""
        raise CheckpointingException(
            f"{type(self).__name__} cannot remove {key_prefix!r} from {checkpoint_dir}: save the state without it"
        )


class SaveShardedStrategy(SaveStrategyBase, ABC):
    """Saves sharded leaves. Every rank calls it."""

    @property
    def can_handle_common_state(self) -> bool:
        """Whether it saves the rest of the state too, as the ``ShardedObject`` with the key ``common_state``."""
        return False

    def prepare(self, checkpoint_dir: CheckpointDir) -> None:
        """Prepare the place of the checkpoint, before anything is written. Called by rank 0 only.

        Raises:
            CheckpointingException: it has a complete checkpoint.
        """

    @abstractmethod
    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: CheckpointDir) -> None:
        """Save the main replicas of ``sharded_state_dict``, which has only sharded leaves."""


class AsyncSaveShardedStrategy(SaveShardedStrategy):
    """Saves sharded leaves, also in the background."""

    @abstractmethod
    def async_save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: CheckpointDir) -> AsyncRequest:
        """Copy the main replicas of ``sharded_state_dict``, and return what is left to do."""

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: CheckpointDir) -> None:
        """Save now."""
        self.async_save(sharded_state_dict, checkpoint_dir).execute_sync()
