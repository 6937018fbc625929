"""States of jobs of several ranks, built in one process: torch's fake process group gives a rank its DTensors.

The DTensors have the real shards of their rank. Only communication is fake, and a save needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from keepstep.checkpoint.planning import RankLayout, plan
from keepstep.checkpoint.reading import Wanted
from keepstep.checkpoint.saving import written
from keepstep.one_copy.world.world_groups import forget_sharding
from keepstep.state.errors import CheckpointNotFound
from keepstep.state.flattening import flatten
from keepstep.state.local_parts import Part, local_parts
from keepstep.state.pack import Pack
from keepstep.state.state_manifest import build_manifest
from keepstep_mesh.protocol.manifest import CHUNK_BYTES, Origin, chunk_length


@contextmanager
def fake_rank(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of a job."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        forget_sharding()


# ---- layouts: each replaces the parameters of a module


def _each_parameter(model: nn.Module, sharded: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(sharded(parameter.detach())))


def _distributed(model: nn.Module, mesh: DeviceMesh, *placements: Placement) -> None:
    _each_parameter(model, lambda one: distribute_tensor(one, mesh, placements, src_data_rank=None))


def _plain(_model: nn.Module, _world_size: int) -> None:
    """Every rank has whole tensors."""


def _fsdp(model: nn.Module, world_size: int) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))


def _tensor_parallel(model: nn.Module, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    _each_parameter(model, lambda one: distribute_tensor(one, mesh, [Shard(one.ndim - 1)], src_data_rank=None))


def _replicated(model: nn.Module, world_size: int) -> None:
    _distributed(model, init_device_mesh("cpu", (world_size,)), Replicate())


def _two(world_size: int) -> tuple[int, int]:
    return (2, world_size // 2) if world_size % 2 == 0 else (1, world_size)


def _hsdp(model: nn.Module, world_size: int) -> None:
    fully_shard(model, mesh=init_device_mesh("cpu", _two(world_size), mesh_dim_names=("copies", "shards")))


def _fsdp_and_tensor_parallel(model: nn.Module, world_size: int) -> None:
    mesh = init_device_mesh("cpu", _two(world_size), mesh_dim_names=("shards", "parallel"))

    def sharded(one: torch.Tensor) -> torch.Tensor:
        even = one.shape[0] % mesh["parallel"].size() == 0
        return distribute_tensor(one, mesh["parallel"], [Shard(0) if even else Replicate()], src_data_rank=None)

    _each_parameter(model, sharded)
    fully_shard(model, mesh=mesh["shards"])


LAYOUTS: Mapping[str, Callable[[nn.Module, int], None]] = {
    "plain": _plain,
    "replicated": _replicated,
    "fsdp": _fsdp,
    "tensor parallel": _tensor_parallel,
    "hsdp": _hsdp,
    "fsdp and tensor parallel": _fsdp_and_tensor_parallel,
}
"""The model has dimensions that are divided evenly and unevenly, and one of size 1: some ranks have an empty shard."""


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 5), nn.LayerNorm(5), nn.Linear(5, 1))


def cut(full: torch.Tensor, like: DTensor) -> DTensor:
    """Return the shard of this rank of ``full``, sharded as ``like``."""
    local, mesh = full, like.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for number, placement in enumerate(like.placements):
        if isinstance(placement, (Shard, _StridedShard)):
            split = placement._split_tensor
            shards, _ = split(local, mesh.size(number), with_padding=False, contiguous=False)
            local = shards[coordinate[number]]
    local = local.contiguous()
    return DTensor.from_local(local, mesh, like.placements, shape=full.shape, stride=full.stride(), run_check=False)


@cache
def _trained() -> dict[str, Any]:
    """Return the state after one step of the optimizer."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(3, 6)).square().sum().backward()
    optimizer.step()
    return {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict(), "step": 1}


def _state(layout: str, world_size: int) -> dict[str, Any]:
    """Return the part of ``_trained`` that this rank has."""
    model, trained = _model(), _trained()
    LAYOUTS[layout](model, world_size)

    def sharded(full: Any, parameter: torch.Tensor) -> Any:
        if not isinstance(parameter, DTensor) or not isinstance(full, torch.Tensor) or full.shape != parameter.shape:
            return full
        return cut(full, parameter)

    parameters = dict(model.named_parameters())
    state = {
        number: {name: sharded(value, parameter) for name, value in trained["optimizer"]["state"][number].items()}
        for number, parameter in enumerate(parameters.values())
    }
    return {
        "model": {name: sharded(full, parameters[name]) for name, full in trained["model"].items()},
        "optimizer": {**trained["optimizer"], "state": state},
        "step": trained["step"],
    }


@cache
def states(layout: str, world_size: int) -> tuple[dict[str, Any], ...]:
    """Return the state of each rank."""
    found = []
    for rank in range(world_size):
        with fake_rank(rank, world_size):
            found.append(_state(layout, world_size))
    return tuple(found)


# ---- a checkpoint in memory


class MemoryReader:
    """A committed checkpoint in memory. Counts the bytes that are read. See ``CheckpointReader``."""

    def __init__(self, packs: list[Pack]) -> None:
        self.packs = packs
        self.read_bytes = 0

    def manifests(self) -> list[bytes]:
        if not self.packs:
            raise CheckpointNotFound("empty")
        hashed = [(pack.content_bytes, pack.digests()) for pack in self.packs]
        return [build_manifest(Origin(), content, hasher.digests, hasher.parts) for content, hasher in hashed]

    def read(self, rank: int, offset: int, length: int, into: memoryview | None = None) -> memoryview:
        self.read_bytes += length
        pack = self.packs[rank]
        first, last = offset // CHUNK_BYTES, -(-(offset + length) // CHUNK_BYTES)
        data = b"".join(bytes(pack.chunk(number)) for number in range(first, last))
        assert len(data) == sum(chunk_length(pack.nbytes, number) for number in range(first, last))
        found = memoryview(data)[offset - first * CHUNK_BYTES :][:length]
        if into is None:
            return found
        into[:] = found
        return into

    def read_all(self, wanted: Sequence[Wanted]) -> None:
        for one in wanted:
            one.view(one.offset, one.offset + one.nbytes)[:] = self.read(one.rank, one.offset, one.nbytes)
            one.arrived(one.nbytes)

    def close(self) -> None:
        pass


def parts_of(state: Mapping[str, Any]) -> dict[str, Part]:
    return local_parts(flatten(state))


def in_memory(ranks: list[dict[str, Part]]) -> MemoryReader:
    """Return a checkpoint that these ranks saved."""
    layouts = [RankLayout.of(parts, {}).pack() for parts in ranks]
    different = list(dict.fromkeys(layouts))
    the_plan = plan([RankLayout.unpack(one) for one in different], [different.index(one) for one in layouts])
    return MemoryReader([written(parts, rank, the_plan) for rank, parts in enumerate(ranks)])
