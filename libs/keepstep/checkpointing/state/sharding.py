"""DTensors: rank i stores its local shard and restores it into the same shard of its own DTensor."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeGuard

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Sharding:
    """Of which global tensor a tensor is the local shard."""

    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    mesh_shape: tuple[int, ...]
    mesh_names: tuple[str, ...]
    placements: tuple[str, ...]


def is_dtensor(value: Any) -> TypeGuard[DTensor]:
    """Without the import, which takes as long as torch itself: who has a DTensor has imported it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def sharding_of(tensor: DTensor) -> Sharding:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: PLC0415  # see above

    mesh = tensor.device_mesh
    _, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    return Sharding(
        tuple(tensor.shape),
        tuple(offset),
        tuple(mesh.shape),
        tuple(mesh.mesh_dim_names or ()),
        tuple([str(placement) for placement in tensor.placements]),
    )
