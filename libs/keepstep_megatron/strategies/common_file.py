"""``common.pt``: the part of a state without sharded leaves, as torch.save writes it. Megatron Core reads it.

Checkpoints of Megatron Core 0.19 have none; the object ``common_state`` takes its place. Objects of strategies that
save none are files beside it: ``KEY/shard_OFFSET_SHAPE.pt``.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from keepstep.checkpoint.places.durable_files import write_whole
from keepstep.state.errors import UnsupportedValue
from keepstep_formats.dcp_metadata import METADATA
from keepstep_formats.foreign_errors import ForeignCheckpointError
from keepstep_formats.pickled_items import is_surely_plain, load_pickled, write_pickled
from keepstep_megatron.core import CheckpointingException
from keepstep_megatron.dict_utils import dict_list_map_outplace, nested_values
from keepstep_megatron.mapping import ShardedObject, ShardedStateDict, StateDict, is_main_replica
from keepstep_megatron.strategies.interfaces import (
    CheckpointDir,
    LoadCommonStrategy,
    SaveCommonStrategy,
    ShardedMetadata,
)
from keepstep_megatron.strategies.stored_dist import TorchDistState
from keepstep_megatron.strategies.stored_state import COMMON_STATE_KEY

COMMON_STATE_FNAME = "common.pt"


_OBJECT = re.compile(r"shard_[\d.]+_[\d.]+\.pt")


def pickled(value: Any, what: str, *, allow_pickle: bool) -> bytes:
    """Return a value as torch.save writes it.

    Args:
        value: the value.
        what: its name, for errors.
        allow_pickle: do not check that a load without ``allow_pickle`` reads it.

    Raises:
        UnsupportedValue: a load would refuse it.
    """
    buffer = io.BytesIO()
    try:
        write_pickled(value, buffer, what)
        if not allow_pickle and not is_surely_plain(value):
            load_pickled(buffer.getvalue(), what)
    except ForeignCheckpointError as error:
        raise UnsupportedValue(
            f"a load would refuse what is saved: {error}. Convert it to tensors and plain values, allow its classes "
            f"with torch.serialization.add_safe_globals, or pass allow_pickle=True to the strategies of save and load"
        ) from error
    return buffer.getvalue()


def object_files(directory: Path) -> dict[str, Path]:
    """Return the files of the objects of a checkpoint, by unique key."""
    found: dict[str, Path] = {}
    for folder, _, files in os.walk(directory):
        key = Path(folder).relative_to(directory).as_posix()
        found |= _objects_of(key, [Path(folder, name) for name in files if _OBJECT.fullmatch(name)])
    return found


def _objects_of(key: str, files: Iterable[Path]) -> Mapping[str, Path]:
    """Return files by unique key. Old versions of Megatron Core left the size of the last axis out of the name."""
    pairs = [(ShardedObject.empty_from_unique_key(f"{key}/{one.stem}"), one) for one in files]
    last = max((one.global_offset[-1] for one, _ in pairs if one.global_offset), default=0) + 1
    wholes = (
        (replace(one, global_shape=(*one.global_shape[:-1], last)) if -1 in one.global_shape else one, file)
        for one, file in pairs
    )
    return {one.unique_key: file for one, file in wholes}


class CommonFileSave(SaveCommonStrategy):
    """Writes ``common.pt``, and the objects of strategies that save none.

    Args:
        backend: name of the format.
        version: of the format.
        allow_pickle: save values of other classes too, which only a load with ``allow_pickle`` reads.
    """

    def __init__(self, backend: str = "torch", version: int = 1, *, allow_pickle: bool = False) -> None:
        super().__init__(backend, version)
        self._allow_pickle = allow_pickle

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True."""
        return True

    def save_common(self, common_state_dict: StateDict, checkpoint_dir: CheckpointDir) -> None:
        """See ``SaveCommonStrategy``.

        Raises:
            UnsupportedValue: the state has a value that ``CommonFileLoad`` would refuse.
        """
        if dist.is_available() and dist.is_initialized() and dist.get_rank():
            return
        path = Path(checkpoint_dir, COMMON_STATE_FNAME)
        write_whole(path, pickled(common_state_dict, COMMON_STATE_FNAME, allow_pickle=self._allow_pickle))

    def save_sharded_objects(self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: CheckpointDir) -> None:
        """See ``SaveCommonStrategy``."""
        for leaf in nested_values(sharded_objects_state_dict):
            if is_main_replica(leaf.replica_id):
                path = Path(checkpoint_dir, f"{leaf.unique_key}.pt")
                path.parent.mkdir(parents=True, exist_ok=True)
                write_whole(path, pickled(leaf.data, leaf.unique_key, allow_pickle=self._allow_pickle))


class CommonFileLoad(LoadCommonStrategy):
    """Reads what ``CommonFileSave`` writes, without running code from it.

    Args:
        allow_pickle: run the code that the file names. Only for a file of one's own.
    """

    def __init__(self, *, allow_pickle: bool = False) -> None:
        self._allow_pickle = allow_pickle

    def load_common(self, checkpoint_dir: CheckpointDir) -> StateDict:
        """See ``LoadCommonStrategy``.

        Raises:
            RefusedClass: the file has objects of other classes than tensors and plain values.
            CheckpointingException: the file does not exist.
        """
        path = Path(checkpoint_dir, COMMON_STATE_FNAME)
        try:
            state = load_pickled(path.read_bytes(), str(path), allow_pickle=self._allow_pickle)
        except FileNotFoundError:
            state = self._stored_object(path)
        if not isinstance(state, dict):
            raise CheckpointingException(f"{path} has a {type(state).__name__}, expected a dict")
        return state

    @property
    def can_handle_sharded_objects(self) -> bool:
        """True."""
        return True

    def load_sharded_objects(
        self, sharded_objects_state_dict: ShardedStateDict, checkpoint_dir: CheckpointDir
    ) -> StateDict:
        """See ``LoadCommonStrategy``.

        Raises:
            CheckpointingException: an object has no file.
        """

        def value(leaf: ShardedObject) -> Any:
            path = files.get(leaf.unique_key)
            if path is None:
                raise CheckpointingException(f"Object shard {leaf.unique_key} not found in {checkpoint_dir}")
            return load_pickled(path, str(path), allow_pickle=self._allow_pickle)

        files = object_files(Path(checkpoint_dir))
        found: StateDict = dict_list_map_outplace(value, sharded_objects_state_dict)
        return found

    def load_sharded_metadata(self, checkpoint_dir: CheckpointDir) -> ShardedMetadata:
        """See ``LoadCommonStrategy``."""
        return {key: ShardedObject.empty_from_unique_key(key) for key in object_files(Path(checkpoint_dir))}

    def _stored_object(self, path: Path) -> Any:
        """Return the object that takes the place of the file."""
        if (path.parent / METADATA).exists():
            stored = TorchDistState(path.parent, allow_pickle=self._allow_pickle)
            if COMMON_STATE_KEY in stored.objects:
                return stored.value(COMMON_STATE_KEY)
        raise CheckpointingException(
            f"{path} not found, and {path.parent} has no object {COMMON_STATE_KEY!r}: the checkpoint is incomplete"
        )
