"""Storage of torch.distributed.checkpoint at a relay, or in a directory of keepstep's format. Nothing is pickled.

torch plans the save and the load; ``RelayWriter`` and ``RelayReader`` move the bytes. A value that is not a tensor is
taken from the planner of a save before it is pickled, and given to the planner of a load without being unpickled.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from keepstep.checkpoint.loading import check_cast, check_lengths, naming_key, open_reader, read_pieces
from keepstep.checkpoint.places.location import parse
from keepstep.checkpoint.saving import TIMEOUT, Kind, open_target, pack_of, save_facts
from keepstep.checkpoint.stored import Piece, StoredCheckpoint, pieces_of
from keepstep.state.errors import CheckpointError
from keepstep.state.flattening import Leaf
from keepstep.state.local_parts import ObjectPart, Part, TensorPart, local_part
from keepstep.state.values.sharding import is_dtensor
from keepstep.state.values.tensor_subclasses import is_whole_value
from keepstep_mesh.protocol.boxes import Box
from keepstep_mesh.protocol.stored_keys import Index


@dataclass(frozen=True)
class _Place:
    """The place of one rank in a save. Travels in the plan that the coordinator sends, and which planners may cache."""

    rank: int
    world_size: int


class _AtCheckpoint:
    """The methods that writer and reader have in common."""

    checkpoint_id: str | os.PathLike[str] | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another save or load. None: keep the ``checkpoint_id``. Raises ``CheckpointError`` if it is invalid."""
        if checkpoint_id is not None:
            parse(checkpoint_id)  # before the ranks plan, as torch does if it has no storage for a place
            self.checkpoint_id = checkpoint_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether ``checkpoint_id`` names a place at a relay, or a directory."""
        try:
            parse(checkpoint_id)
        except CheckpointError:
            return False
        return True


class RelayWriter(_AtCheckpoint, StorageWriter):
    """Storage of ``torch.distributed.checkpoint.save`` and ``async_save``, with any planner.

    Args:
        checkpoint_id: see ``keepstep.checkpoint.save``. None: that of the call of ``save``.
        step: step of the training, for lists of checkpoints.
        kind: see ``keepstep.checkpoint.save``.
        sync: see ``keepstep.checkpoint.save``.
        overwrite: see ``keepstep.checkpoint.save``.
        timeout: time limit of a save.
        token: token for the relay. Default: that of the environment.
    """

    def __init__(
        self,
        checkpoint_id: str | os.PathLike[str] | None = None,
        *,
        step: int = 0,
        kind: Kind = "durable",
        sync: bool = True,
        overwrite: bool = False,
        timeout: timedelta = TIMEOUT,
        token: str | None = None,
    ) -> None:
        self.reset(checkpoint_id)
        self._step = step
        self._kind = kind
        self._sync = sync
        self._overwrite = overwrite
        self._timeout = timeout
        self._token = token
        self._rank = 0
        self._use_collectives = True

    def storage_meta(self) -> StorageMeta:
        """Return the place of the save, for ``set_up_planner`` of a planner. Called by torch."""
        return StorageMeta(self.checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Remember the rank of this process. Called by torch."""
        del is_coordinator, args
        self._rank = kwargs.get("rank", 0)
        self._use_collectives = kwargs.get("use_collectives", True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return ``plan``. Called by torch."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans, each with its place in the save. Called by torch, on the coordinator."""
        if not self._use_collectives:  # each rank has only its own plan
            world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
            return [replace(plan, storage_data=_Place(self._rank, world_size)) for plan in plans]
        return [replace(plan, storage_data=_Place(rank, len(plans))) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Store the items of ``plan``, and wait until the checkpoint is committed. Called by torch.

        Raises:
            CheckpointAborted: a rank failed or was lost.
            CheckpointError: the part of this rank was not stored.
        """
        place = plan.storage_data
        if not isinstance(place, _Place) or self.checkpoint_id is None:
            raise CheckpointError("RelayWriter has no place to save to: pass checkpoint_id to it, or to save()")
        facts = save_facts(
            place.rank, place.world_size, self._step, self._kind, sync=self._sync, overwrite=self._overwrite
        )
        target = open_target(self.checkpoint_id, facts, timeout=self._timeout, token=self._token)
        try:
            target.begin()
            try:
                if place.world_size > 1:
                    target.exchange(b"")  # the plan may be one of an earlier save, which the planner has cached
                check_boxes(planner)
                parts = dict(_merged((item, planner) for item in plan.items))
                target.store(pack_of(parts))
                target.commit()
            except BaseException as error:
                target.fail(f"{type(error).__name__}: {error}")
                raise
        finally:
            target.close()
        future: Future[list[WriteResult]] = Future()
        future.set_result([WriteResult(item.index, item.tensor_storage_size() or 0, None) for item in plan.items])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Do nothing: the checkpoint is committed since every rank has stored its part. Called by torch."""


def _merged(items: Iterable[tuple[WriteItem, SavePlanner]]) -> dict[str, Part]:
    """Return the parts to store, by key. A tensor may have several shards."""
    found: dict[str, Part] = {}
    for item, planner in items:
        key, part = item.index.fqn, _part(item, planner)
        known = found.get(key)
        if isinstance(known, TensorPart) and isinstance(part, TensorPart):
            part = replace(known, pieces=(*known.pieces, *part.pieces))
        found[key] = part
    return found


def _part(item: WriteItem, planner: SavePlanner) -> Part:
    key = item.index.fqn
    mappings = getattr(planner, "mappings", {})
    path = tuple(Index(step) if type(step) is int else step for step in mappings.get(key, (key,)))
    if item.type is WriteItemType.BYTE_IO:
        if isinstance(planner, DefaultSavePlanner) and _keeps(planner, DefaultSavePlanner, "transform_object"):
            return ObjectPart(path, planner.lookup_object(item.index))
        data = planner.resolve_data(item)
        return ObjectPart(path, data.getvalue() if isinstance(data, io.BytesIO) else data)
    tensor, described = planner.resolve_data(item), item.tensor_data
    assert described is not None
    assert isinstance(tensor, torch.Tensor)
    if is_whole_value(tensor):
        return ObjectPart(path, tensor)
    box = Box(tuple(described.chunk.offsets), tuple(described.chunk.sizes))
    tensor = tensor.to_local() if is_dtensor(tensor) else tensor
    if tuple(tensor.shape) != box.shape:
        raise CheckpointError(
            f"{key}: its plan has a shard of shape {box.shape}, but the shard has {tuple(tensor.shape)}"
        )
    is_sharded = item.type is WriteItemType.SHARD
    shape = tuple(described.size)
    pieces = ((box, tensor.detach()),) if box.volume or not described.size.numel() else ()
    return TensorPart(path, tensor.dtype, shape, pieces, None, is_sharded)


def _keeps(planner: object, base: type, method: str) -> bool:
    """Return whether the class of ``planner`` has ``method`` from ``base``."""
    return getattr(type(planner), method) is getattr(base, method)


class RelayReader(_AtCheckpoint, StorageReader):
    """Storage of ``torch.distributed.checkpoint.load``, with any planner that does not unpickle.

    Args:
        checkpoint_id: see ``keepstep.checkpoint.save``. None: that of the call of ``load``.
        timeout: time limit of a load.
        token: token for the relay. Default: that of the environment.
    """

    def __init__(
        self,
        checkpoint_id: str | os.PathLike[str] | None = None,
        *,
        timeout: timedelta = TIMEOUT,
        token: str | None = None,
    ) -> None:
        self.reset(checkpoint_id)
        self._timeout = timeout
        self._token = token
        self._stored: StoredCheckpoint | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the manifests of all ranks. Called by torch.

        Raises:
            CheckpointNotFound: the checkpoint does not exist, or is not committed.
            CheckpointError: a stored tensor is incomplete.
        """
        del args, kwargs
        if self.checkpoint_id is None:
            raise CheckpointError("RelayReader has no checkpoint to load: pass checkpoint_id to it, or to load()")
        reader = open_reader(self.checkpoint_id, timeout=self._timeout, token=self._token)
        try:
            self._stored = StoredCheckpoint(reader)
        except BaseException:
            reader.close()
            raise
        found = self._stored.metadata()
        found.version = CURRENT_DCP_VERSION  # its keys are those of this torch
        found.storage_meta = StorageMeta(self.checkpoint_id)
        return found

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing. Called by torch."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return ``plan``. Called by torch."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return ``plans``. Called by torch."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of ``plan`` into the tensors of ``planner``. Called by torch.

        Raises:
            CheckpointDamaged: stored bytes are damaged; the error names the file and the key.
        """
        stored, self._stored = self._stored, None
        if stored is None:
            raise CheckpointError("read_data() was called before read_metadata()")
        try:
            check_boxes(planner)
            tensors = [item for item in plan.items if item.type is LoadItemType.TENSOR]
            is_partial = getattr(planner, "allow_partial_load", False)
            if not is_partial:
                check_lengths(_leaves(planner), stored)
            targets = [planner.resolve_tensor(item).detach() for item in tensors]
            for item, target in () if is_partial else zip(tensors, targets, strict=True):
                check_cast(item.storage_index.fqn, stored.tensors[item.storage_index.fqn].dtype, target.dtype)
            read_pieces(
                stored.reader,
                [
                    (item.storage_index.fqn, piece, target)
                    for item, target in zip(tensors, targets, strict=True)
                    for piece in _pieces(stored, item)
                ],
            )
            for item, target in zip(tensors, targets, strict=True):
                planner.commit_tensor(item, target)
            for item in plan.items:
                if item.type is not LoadItemType.TENSOR:
                    key = item.storage_index.fqn
                    into = getattr(planner, "state_dict", {}).get(key)
                    into = into if isinstance(into, torch.Tensor) else None
                    _deliver(item, planner, naming_key(key, lambda key=key, into=into: stored.value(key, into)))
        finally:
            stored.reader.close()
        future: Future[None] = Future()
        future.set_result(None)
        return future


def check_boxes(planner: SavePlanner | LoadPlanner) -> None:
    """Raise ``CheckpointError`` for a DTensor whose shard has several boxes: torch plans it as one, which is wrong."""
    for key, value in getattr(planner, "state_dict", {}).items():
        if is_dtensor(value):
            part = local_part(key, Leaf((key,), value))
            if isinstance(part, TensorPart) and len(part.pieces) > 1:
                raise CheckpointError(
                    f"{key} has a shard of several parts ({', '.join(str(box) for box, _ in part.pieces)}), which "
                    f"torch.distributed.checkpoint takes for one: use keepstep.checkpoint.save and load"
                )


def _leaves(planner: LoadPlanner) -> list[Leaf]:
    """Return the values of a planner that flattens the state; of any other: none."""
    mappings, state = getattr(planner, "mappings", {}), getattr(planner, "state_dict", {})
    return [
        Leaf(tuple(Index(step) if type(step) is int else step for step in path), state.get(key))
        for key, path in mappings.items()
    ]


def _pieces(stored: StoredCheckpoint, item: ReadItem) -> Iterator[Piece]:
    """Yield what to read for one item."""
    offset = tuple(item.storage_index.offset or ())
    shard = next(one for one in stored.tensors[item.storage_index.fqn].shards if one.box.offset == offset)
    start = tuple(a + b for a, b in zip(offset, item.storage_offsets, strict=True))
    yield from pieces_of(shard, Box(start, tuple(item.lengths)))


def _deliver(item: ReadItem, planner: LoadPlanner, value: Any) -> None:
    """Give a value that is not a tensor to the planner."""
    key = item.dest_index.fqn
    if isinstance(planner, DefaultLoadPlanner) and _keeps(planner, DefaultLoadPlanner, "load_bytes"):
        if planner.flatten_state_dict:
            _place(planner.original_state_dict, planner.mappings[key], value)
        else:
            planner.state_dict[key] = planner.original_state_dict[key] = value  # the first may be a copy, to drop
    elif isinstance(value, bytes):
        planner.load_bytes(item, io.BytesIO(value))
    else:
        raise CheckpointError(
            f"{key} is a {type(value).__name__}, and {type(planner).__name__}.load_bytes expects the bytes of its own "
            f"save planner: save with that planner, or load with one that inherits DefaultLoadPlanner.load_bytes"
        )


def _place(state: Any, path: Iterable[Any], value: Any) -> None:
    """Set a value of ``state`` that is there. torch's planner has all keys of dicts as text, also numbers."""
    *steps, last = path
    for step in steps:
        state = state[_own_key(state, step)]
    state[_own_key(state, last)] = value


def _own_key(container: Any, step: Any) -> Any:
    if not isinstance(container, Mapping) or step in container:
        return step
    return next((key for key in container if str(key) == step), step)
