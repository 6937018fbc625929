"""Public: sharded tensors that ``torch.distributed.checkpoint`` saves and loads, under the names of Megatron Core.

``keepstep.sharded.save`` and ``load`` take a ``ShardedTensor`` as it is. These are for ``dcp.save`` and ``dcp.load``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn, Self

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from keepstep_megatron.core import CheckpointingException
from keepstep_megatron.mapping import ShardedTensor

__all__ = ["CheckpointableShardedTensor", "LocalShardsContainer"]


class LocalShardsContainer(torch.Tensor):
    """A global tensor of which this rank has parts: a value of a state dict for ``dcp.save`` and ``dcp.load``.

    It has a shape and a dtype, and no operations. A load writes into the memory of the parts.

    Args:
        local_shards: at least one; all of the same global tensor.

    Attributes:
        parts: the parts, with their data.
    """

    parts: list[ShardedTensor]

    @staticmethod
    def __new__(cls: type[Self], local_shards: Sequence[CheckpointableShardedTensor]) -> Self:
        if not local_shards:
            raise CheckpointingException("local_shards is empty: expected at least one part; leave the key out instead")
        made: Self = _whole(cls, local_shards[0].parts[0])
        return made

    def __init__(self, local_shards: Sequence[CheckpointableShardedTensor]) -> None:
        self._local_shards = local_shards
        self.parts = [part for shard in local_shards for part in shard.parts]

    def __create_write_items__(self, fqn: str, value: LocalShardsContainer) -> list[WriteItem]:
        """Return what a save writes. Like the next two, a method that torch looks for."""
        return [
            WriteItem(
                MetadataIndex(fqn, one.offsets, number),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(one, TensorProperties(dtype=value.dtype), value.size()),
            )
            for number, one in enumerate(value.__create_chunk_list__())
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """Return the places of the parts."""
        return [ChunkStorageMetadata(torch.Size(one.global_offset), torch.Size(one.box_shape)) for one in self.parts]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        """Return the memory of the part at a place."""
        for part in self.parts:
            if index.offset is None or torch.Size(part.global_offset) == index.offset:
                assert part.data is not None
                return part.data.detach().view(part.box_shape)
        raise CheckpointingException(f"{index.fqn!r} has no part at {index.offset} on this rank")

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> NoReturn:
        raise NotImplementedError(
            f"{cls.__name__} has no memory of its own for {func}: it is a value for dcp.save and dcp.load only; "
            f"keepstep.sharded.save takes the ShardedTensor itself"
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.parts})"


class CheckpointableShardedTensor(LocalShardsContainer):
    """A global tensor of which this rank has one part. ``from_sh_ten`` makes one."""

    @staticmethod
    def __new__(cls: type[Self], data: torch.Tensor, sh_ten: ShardedTensor) -> Self:
        if sh_ten.data is None or sh_ten.flattened_range is not None:
            raise CheckpointingException(
                f"ShardedTensor {sh_ten.key!r} cannot be saved by dcp.save: expected data, and no flattened_range"
            )
        made: Self = _whole(cls, sh_ten)
        return made

    def __init__(self, data: torch.Tensor, sh_ten: ShardedTensor) -> None:
        self._data, self._sh_ten, self.parts = data, sh_ten, [sh_ten]

    @classmethod
    def from_sh_ten(cls, sh_ten: ShardedTensor) -> Self:
        """Make one of a sharded tensor.

        Args:
            sh_ten: the part; its ``data`` is saved, and written by a load.

        Raises:
            CheckpointingException: it has no ``data``, or a ``flattened_range``.
        """
        return cls(sh_ten.data, sh_ten)  # type: ignore[arg-type]


def _whole(cls: Any, part: ShardedTensor) -> Any:
    return torch.Tensor._make_wrapper_subclass(cls, torch.Size(part.global_shape), dtype=part.dtype)  # noqa: SLF001
