"""DTensors: each rank stores its local shard, and restores it into the same shard of its own DTensor."""

from __future__ import annotations

import gc
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeGuard, cast

import torch

from keepstep.state.errors import StateMismatch
from keepstep_mesh.protocol.state_content import Sharding

if TYPE_CHECKING:
    from torch.distributed._shard.sharded_tensor import ShardedTensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

_PLACEMENT = re.compile(r"(?P<kind>R|S|P|_S)(?:\((?P<argument>\w+)(?:, (?P<split_factor>\d+))?\))?")


@dataclass(frozen=True)
class LocalShard:
    """A box of a global tensor, to store in a state in the place of a DTensor."""

    tensor: torch.Tensor
    sharding: Sharding


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Return whether ``value`` is a DTensor. Does not import DTensor: the import takes as long as that of torch."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def is_sharded_tensor(value: object) -> TypeGuard[ShardedTensor]:
    """Return whether ``value`` is a ShardedTensor. Does not import it."""
    module = sys.modules.get("torch.distributed._shard.sharded_tensor")
    return module is not None and isinstance(value, module.ShardedTensor)


def sharding_of(tensor: DTensor) -> Sharding:
    """Return the sharding of the local shard of ``tensor``."""
    return _describe(tensor.shape, tensor.device_mesh, tensor.placements)[0]


def _describe(
    shape: tuple[int, ...], mesh: DeviceMesh, placements: Iterable[Placement]
) -> tuple[Sharding, tuple[int, ...]]:
    """Return the sharding and the shape of the shard of this rank."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset  # noqa: PLC0415  # slow import

    placements = tuple(placements)
    local_shape, offset = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)
    sharding = Sharding(
        tuple(shape),
        tuple(offset),
        tuple(mesh.shape),
        tuple(mesh.mesh_dim_names or ()),
        tuple([str(placement) for placement in placements]),
    )
    return sharding, tuple(local_shape)


class MeshFinder:
    """Finds the device mesh of this process over which a tensor is sharded.

    Args:
        known: the DTensors of this process in the same state. Their meshes are considered before all others, first
            those of DTensors that are sharded alike.
    """

    def __init__(self, known: Iterable[tuple[Sharding, DeviceMesh]]) -> None:
        self._alike: dict[Sharding, list[DeviceMesh]] = {}
        for sharding, mesh in known:
            self._alike.setdefault(sharding, []).append(mesh)
        self._known = [mesh for meshes in self._alike.values() for mesh in meshes]

    @cached_property
    def _of_process(self) -> list[DeviceMesh]:
        return _meshes_of_process()

    def find(self, sharding: Sharding, local_shape: tuple[int, ...], path: str) -> DeviceMesh:
        """Return the mesh on which ``sharding`` gives this rank a shard of ``local_shape``.

        Args:
            path: path of the tensor in the state, for the error.

        Raises:
            StateMismatch: no mesh fits, or several different meshes fit.
        """
        fitting = self._fitting(self._alike.get(sharding, ()), sharding, local_shape)
        fitting = fitting or self._fitting(self._known, sharding, local_shape)
        fitting = fitting or self._fitting(self._of_process, sharding, local_shape)
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            raise StateMismatch(
                f"{path} is one shard of a DTensor, and {len(fitting)} device meshes of this process fit it "
                f"({'; '.join(map(str, fitting))}): pass `into` with the DTensor to receive it in"
            )
        raise StateMismatch(
            f"{path} is one shard of a DTensor, and no device mesh of this process fits it: create the mesh with "
            f"init_device_mesh before, or pass `into` with the DTensor to receive it in; the source has {sharding}"
        )

    @staticmethod
    def _fitting(
        candidates: Iterable[DeviceMesh], sharding: Sharding, local_shape: tuple[int, ...]
    ) -> list[DeviceMesh]:
        fitting: list[DeviceMesh] = []
        for mesh in {id(mesh): mesh for mesh in candidates}.values():
            if mesh not in fitting and _fits(mesh, sharding, local_shape):
                fitting.append(mesh)
        return fitting


def _meshes_of_process() -> list[DeviceMesh]:
    """Return all device meshes whose process groups work. torch has no list of them; the garbage collector does."""
    module = sys.modules.get("torch.distributed.device_mesh")
    if module is None or not torch.distributed.is_initialized():
        return []
    found = [one for one in gc.get_objects() if issubclass(type(one), module.DeviceMesh)]
    return [mesh for mesh in found if _works(mesh)]


def _works(mesh: DeviceMesh) -> bool:
    try:
        for group in mesh.get_all_groups():
            torch.distributed.get_process_group_ranks(group)
    except (KeyError, RuntimeError, ValueError):  # the mesh has no groups, or they were destroyed
        return False
    return True


def _fits(mesh: DeviceMesh, sharding: Sharding, local_shape: tuple[int, ...]) -> bool:
    if tuple(mesh.shape) != sharding.mesh_shape or (mesh.get_coordinate() is None and mesh.ndim):
        return False
    found, shape = _describe(sharding.global_shape, mesh, _placements(sharding))
    # torch describes the shard of a rank that is not in the mesh as empty; without dimensions nothing is sharded
    return found == sharding and local_shape == (shape if mesh.ndim else sharding.global_shape)


def to_dtensor(local: torch.Tensor, sharding: Sharding, mesh: DeviceMesh) -> DTensor:
    """Return the DTensor whose local shard is ``local``. Shares its memory if it is on the device of ``mesh``."""
    from torch.distributed.tensor import DTensor  # noqa: PLC0415  # slow import

    shape, placements = torch.Size(sharding.global_shape), _placements(sharding)
    stride = _global_stride(local, shape)
    if mesh.get_coordinate() is None:  # `from_local` would make it empty
        return _wrapped(local, mesh, placements, shape, stride)
    return DTensor.from_local(local, mesh, placements, shape=shape, stride=stride)


def new_like(like: DTensor, *, dtype: torch.dtype | None = None) -> DTensor:
    """Return a DTensor with new memory, which needs no gradient.

    torch's own ``empty_like`` enters a ``FakeTensorMode`` in each thread, which can crash the process if two threads
    do: docs/dependencies.md.

    Args:
        like: the new one has its shape, sharding and device. A tensor on the device "meta" gets that of its mesh.
        dtype: that of the new one. Default: that of ``like``.
    """
    device = like.device_mesh.device_type if like.is_meta else None
    local = torch.empty_like(like.to_local().detach(), dtype=dtype, device=device)
    return _wrapped(local, like.device_mesh, like.placements, like.shape, like.stride())


def _wrapped(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, stride: tuple[int, ...]
) -> DTensor:
    from torch.distributed.tensor import DTensor  # noqa: PLC0415  # slow import
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta  # noqa: PLC0415  # slow import

    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, stride, local.dtype))
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def _global_stride(local: torch.Tensor, shape: torch.Size) -> tuple[int, ...]:
    """Return the stride of a dense tensor of ``shape`` with the dimension order of ``local`` in memory."""
    strides, step = [0] * len(shape), 1
    for dimension in sorted(range(len(shape)), key=lambda one: (local.stride(one), -one)):
        strides[dimension] = step
        step *= max(shape[dimension], 1)
    return tuple(strides)


def _placements(sharding: Sharding) -> list[Placement]:
    """Parse the placements. Raises ``StateMismatch`` for an unknown placement."""
    return [_placement(name) for name in sharding.placements]


def _placement(name: str) -> Placement:
    from torch.distributed.tensor import Partial, Replicate, Shard, placement_types  # noqa: PLC0415  # slow import

    parsed = _PLACEMENT.fullmatch(name)
    match parsed.groups() if parsed else None:
        case "R", None, None:
            return Replicate()
        case "S", str(dimension), None if dimension.isdecimal():
            return Shard(int(dimension))
        case "P", str(operation), None:
            return Partial(operation)
        case "_S", str(dimension), str(factor) if dimension.isdecimal():
            return cast("Placement", placement_types._StridedShard(int(dimension), split_factor=int(factor)))  # noqa: SLF001
    raise StateMismatch(f"unknown placement {name!r} of a DTensor: pass `into` with the DTensor to receive it in")
