"""Reading of ``torch_dist`` checkpoints: directories of torch.distributed.checkpoint. Runs no code from them."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from keepstep_formats.dcp_directory import read_shard_into, read_value
from keepstep_formats.dcp_metadata import ByteRange, chunk_shape, read_dcp_metadata
from keepstep_formats.foreign_errors import ForeignCheckpointError
from keepstep_megatron.pieces import boxes_of_range
from keepstep_megatron.strategies.directory_loading import read_all
from keepstep_megatron.strategies.stored_state import Destination, StoredTensorFacts
from keepstep_mesh.protocol.boxes import Box, Sizes, uncovered


@dataclass(frozen=True)
class _StoredShard:
    """A stored part of a tensor."""

    where: ByteRange
    box: Box
    """As ``.metadata`` has it."""
    boxes: tuple[Box, ...]
    """Of the global tensor, in the order of the stored elements. Several, if a flattened range was stored."""


@dataclass(frozen=True)
class _Copy:
    shard: _StoredShard
    first: int
    """Position of the box in the stored elements."""
    box: Box
    overlap: Box
    memory: torch.Tensor

    def is_whole(self, dtype: torch.dtype) -> bool:
        """Whether the bytes of the part can be read into the memory."""
        memory = self.memory
        is_plain = memory.is_contiguous() and memory.device.type == "cpu" and memory.dtype == dtype
        return is_plain and self.overlap == self.shard.box


class TorchDistState:
    """See ``StoredState``.

    Args:
        directory: the checkpoint.
        allow_pickle: run the code that objects name. Only for a checkpoint of one's own.

    Raises:
        ForeignCheckpointError: ``.metadata`` is missing or damaged.
    """

    def __init__(self, directory: Path, *, allow_pickle: bool = False) -> None:
        self._directory = directory
        self._allow_pickle = allow_pickle
        self.content = read_dcp_metadata(directory, allow_gaps=True)

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensorFacts]:
        """See ``StoredState``."""
        flattened = self.content.flattened
        return {
            key: StoredTensorFacts(one.dtype, flattened.get(key, one.shape))
            for key, one in self.content.tensors.items()
        }

    @property
    def objects(self) -> tuple[str, ...]:
        """See ``StoredState``."""
        return tuple(self.content.objects)

    def read(self, destinations: list[Destination]) -> None:
        """See ``StoredState``. Reads each stored part once."""
        copies: defaultdict[tuple[str, ByteRange], list[_Copy]] = defaultdict(list)
        shards = {key: self._shards(key) for key in {one.key for one in destinations}}
        for one in destinations:
            overlaps = []
            for shard in shards[one.key]:
                first = 0
                for box in shard.boxes:
                    overlap = box.overlap(one.box)
                    if overlap is not None:
                        memory = one.memory[overlap.within(one.box)]
                        copies[one.key, shard.where].append(_Copy(shard, first, box, overlap, memory))
                        overlaps.append(overlap)
                    first += box.volume
            if one.key in self.content.incomplete:
                self._check_covered(one, overlaps)
        ordered = sorted(copies.items(), key=lambda item: (item[0][1].file, item[0][1].offset))
        read_all(partial(self._read_shard, key, found) for (key, _), found in ordered)

    def _check_covered(self, wanted: Destination, found: list[Box]) -> None:
        """Raise if shards do not tile a box of a tensor that they do not tile."""
        start, shape = wanted.box.offset, wanted.box.shape
        inside = [Box(tuple(a - b for a, b in zip(one.offset, start, strict=True)), one.shape) for one in found]
        if problem := uncovered(shape, inside):
            raise ForeignCheckpointError(
                f"{self._directory} does not have all of {wanted.box} of {wanted.key!r}: {problem}"
            )

    def _shards(self, key: str) -> list[_StoredShard]:
        tensor, original = self.content.tensors[key], self.content.flattened.get(key)
        if original is None:
            return [_StoredShard(where, box, (box,)) for box, where in tensor.shards.items()]
        chunk = chunk_shape(original, tensor.shape, key)
        return [_StoredShard(where, box, _unflattened(box, chunk)) for box, where in tensor.shards.items()]

    def _read_shard(self, key: str, copies: list[_Copy]) -> None:
        shard, dtype = copies[0].shard, self.content.tensors[key].dtype
        with torch.no_grad():
            if len(copies) == 1 and copies[0].is_whole(dtype):
                read_shard_into(self._directory, shard.where, key, shard.box, copies[0].memory)
                return
            stored = _scratch(shard.box.volume, dtype)
            read_shard_into(self._directory, shard.where, key, shard.box, stored.view(shard.box.shape))
            for one in copies:
                part = stored[one.first : one.first + one.box.volume].view(one.box.shape)
                one.memory.copy_(part[one.overlap.within(one.box)])

    def value(self, unique_key: str) -> Any:
        """See ``StoredState``."""
        where = self.content.objects[unique_key]
        found = read_value(self._directory, where, unique_key, allow_pickle=self._allow_pickle)
        if not isinstance(found, list) or len(found) != 1:
            got = f"{len(found)} values" if isinstance(found, list) else type(found).__name__
            raise ForeignCheckpointError(
                f"{unique_key!r} in {self._directory} is not a ShardedObject: expected a list of one value, got {got}"
            )
        return found[0]


_local = threading.local()


def _scratch(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return memory for elements, which the next call of this thread uses again."""
    size = count * dtype.itemsize
    if getattr(_local, "memory", None) is None or _local.memory.numel() < size:
        _local.memory = torch.empty(size, dtype=torch.uint8)
    memory: torch.Tensor = _local.memory[:size].view(dtype)
    return memory


def _unflattened(box: Box, chunk: Sizes) -> tuple[Box, ...]:
    """Return the boxes of the original tensor that a part of flattened chunks has."""
    if math.prod(box.shape[:-1]) != 1:
        raise ForeignCheckpointError(f"the part {box} has several flattened chunks, expected one")
    corner = [number * size for number, size in zip(box.offset, chunk, strict=False)]
    start, length = box.offset[-1], box.shape[-1]
    return tuple(
        Box(tuple(map(sum, zip(corner, one.offset, strict=True))), one.shape)
        for one in boxes_of_range(chunk, start, start + length)
    )
