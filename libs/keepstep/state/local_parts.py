"""Parts of a state that one rank holds: whole tensors, shards of tensors, and values that are not tensors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import torch

from keepstep.state.errors import CheckpointError, UnsupportedValue
from keepstep.state.flattening import Leaf
from keepstep.state.values.known_classes import class_name
from keepstep.state.values.leaves import TORCH_DTYPE_NAMES
from keepstep.state.values.sharding import is_dtensor, is_sharded_tensor, sharding_of
from keepstep.state.values.tensor_subclasses import is_whole_value, plain, refusal
from keepstep.state.values.tensors_in_containers import outer_tensors_in
from keepstep_mesh.protocol.boxes import Box, Sizes, whole
from keepstep_mesh.protocol.stored_keys import Path, key_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Mesh:
    """A device mesh, as far as it says which ranks hold which shards."""

    ranks: Sizes
    """All ranks, in row-major order."""
    shape: Sizes
    placements: tuple[str, ...]
    """One for each dimension, as torch prints it: ``S(0)``, ``R``."""

    @property
    def copied(self) -> tuple[int, ...]:
        """Dimensions along which the ranks hold copies."""
        return tuple(number for number, placement in enumerate(self.placements) if placement == "R")


@dataclass(frozen=True)
class TensorPart:
    """The part of one tensor that this rank holds.

    Raises:
        UnsupportedValue: a piece is no ordinary tensor with memory of its own, is not dense, or has another dtype.
    """

    path: Path
    dtype: torch.dtype
    shape: Sizes
    """Of the global tensor."""
    pieces: tuple[tuple[Box, torch.Tensor], ...]
    """Boxes of the global tensor, and their memory. Empty boxes are absent."""
    mesh: Mesh | None
    """None: not a DTensor."""
    is_sharded: bool
    """False: the whole tensor, which other ranks may hold too."""

    def __post_init__(self) -> None:
        for _, tensor in self.pieces:
            found = plain(tensor, key_of(self.path))
            if found.layout is not torch.strided or found.dtype not in TORCH_DTYPE_NAMES:
                raise refusal(found, key_of(self.path))

    @property
    def nbytes(self) -> int:
        """Bytes of the global tensor."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class ObjectPart:
    """A value that is stored whole: it is not a tensor, or one that wraps others or is quantized.

    Raises:
        UnsupportedValue: it has a shard of a tensor in it, of which other ranks have the rest.
    """

    path: Path
    value: Any

    def __post_init__(self) -> None:
        if any(is_dtensor(one) or is_sharded_tensor(one) for one in outer_tensors_in(self.value)):
            raise UnsupportedValue(
                f"{key_of(self.path)} is a {class_name(type(self.value))} with a shard of a tensor in it, but only one "
                f"rank stores it: put the shards into a list or a dict, which all ranks store"
            )


Part = TensorPart | ObjectPart


def local_parts(leaves: Mapping[str, Leaf]) -> dict[str, Part]:
    """Return what this rank holds of each leaf.

    Raises:
        UnsupportedValue: a tensor cannot be stored; the error names its key.
    """
    shards = _Shards()
    return {key: _part(key, leaf, shards) for key, leaf in leaves.items()}


def local_part(key: str, leaf: Leaf) -> Part:
    """Return what this rank holds of one leaf. Raises ``UnsupportedValue``."""
    return _part(key, leaf, _Shards())


def _part(key: str, leaf: Leaf, shards: _Shards) -> Part:
    value = leaf.value
    if not isinstance(value, torch.Tensor) or is_whole_value(value):
        return ObjectPart(leaf.path, value)
    try:
        mesh, is_sharded, shape = None, True, tuple(value.size())
    except RuntimeError as error:  # a nested tensor has no size
        raise refusal(value, key) from error
    if is_dtensor(value):
        _check_shard(key, value)
        mesh = shards.mesh(key, value)
        pieces = shards.pieces(key, value)
    elif is_sharded_tensor(value):
        pieces = [
            (Box(tuple(one.metadata.shard_offsets), tuple(one.metadata.shard_sizes)), one.tensor.detach())
            for one in value.local_shards()
        ]
    else:
        is_sharded = False
        pieces = [(whole(shape), value.detach())]
    kept = tuple((box, tensor) for box, tensor in pieces if box.volume or not math.prod(shape))
    return TensorPart(leaf.path, value.dtype, shape, kept, mesh, is_sharded)


def _check_shard(key: str, value: DTensor) -> None:
    with torch.no_grad():
        local = value.to_local()
    if is_whole_value(local):
        raise UnsupportedValue(
            f"{key} is a DTensor whose shards are {class_name(type(local))}, which a checkpoint of several ranks "
            f"cannot cut in another way: use an optimizer without quantized state, or durable checkpoints of a Manager"
        )


class _Shards:
    """Shards of DTensors. Many DTensors of a state are sharded alike, so the description is computed once."""

    def __init__(self) -> None:
        self._meshes: dict[Any, Mesh] = {}
        self._boxes: dict[Any, list[tuple[Box, tuple[slice, ...]]]] = {}

    def mesh(self, key: str, tensor: DTensor) -> Mesh:
        """Return the mesh of a DTensor. Raises ``UnsupportedValue`` if it is partial."""
        device_mesh, placements = tensor.device_mesh, tensor.placements
        found = self._meshes.get((id(device_mesh), placements))
        if found is None:
            for placement in placements:
                if placement.is_partial():
                    raise UnsupportedValue(
                        f"{key} is a partial DTensor ({placement}): reduce it first, with redistribute"
                    )
            ranks = device_mesh.mesh
            names = tuple(str(placement) for placement in placements)
            found = Mesh(tuple(ranks.flatten().tolist()), tuple(ranks.shape), names)
            self._meshes[id(device_mesh), placements] = found
        return found

    def pieces(self, key: str, tensor: DTensor) -> list[tuple[Box, torch.Tensor]]:
        """Return the boxes of the shard of this rank, and their memory."""
        if tensor.device_mesh.get_coordinate() is None:
            return []
        local = tensor.to_local().detach()
        alike = (id(tensor.device_mesh), tensor.placements, tensor.shape)
        found = self._boxes.get(alike)
        if found is None:
            found = self._boxes[alike] = list(_boxes(tensor, local))
        if sum(box.volume for box, _ in found) != local.numel():
            raise CheckpointError(f"{key}: its shard has shape {tuple(local.shape)}, which does not fit {tensor}")
        return [(box, local[where]) for box, where in found]


def _boxes(tensor: DTensor, local: torch.Tensor) -> Iterator[tuple[Box, tuple[slice, ...]]]:
    """Yield the boxes of the shard of this rank, and their places in it."""
    if any("_Strided" in type(placement).__name__ for placement in tensor.placements):
        runs = [_runs(tensor, dimension) for dimension in range(tensor.ndim)]
    else:
        offset = sharding_of(tensor).global_offset
        runs = [[(start, 0, size)] for start, size in zip(offset, local.shape, strict=True)]
    for combination in product(*runs):
        box = Box(tuple(start for start, _, _ in combination), tuple(size for _, _, size in combination))
        yield box, tuple(slice(at, at + size) for _, at, size in combination)


def _runs(tensor: DTensor, dimension: int) -> list[tuple[int, int, int]]:
    """Return the runs of consecutive indices of one dimension: (global start, local start, length)."""
    coordinate = tensor.device_mesh.get_coordinate()
    assert coordinate is not None
    indices = torch.arange(tensor.shape[dimension])
    for number, placement in enumerate(tensor.placements):
        if getattr(placement, "dim", None) == dimension:
            kind: Any = type(placement)
            factor = getattr(placement, "split_factor", None)
            flat = kind(0) if factor is None else kind(0, split_factor=factor)
            size = tensor.device_mesh.size(number)
            shards, _ = flat._split_tensor(indices, size, with_padding=False, contiguous=False)  # noqa: SLF001
            indices = shards[coordinate[number]]
    runs: list[tuple[int, int, int]] = []
    for local, index in enumerate(indices.tolist()):
        if runs and runs[-1][0] + runs[-1][2] == index:
            start, at, size = runs[-1]
            runs[-1] = (start, at, size + 1)
        else:
            runs.append((index, local, 1))
    return runs
