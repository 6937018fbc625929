"""A durable checkpoint of two ranks, loaded by groups of another number of ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from keepstep.checkpoint import CheckpointDamaged
from keepstep.checkpoint.managed.resharding import load_resharded
from keepstep.relay_client.relay_paths import AtRelay
from keepstep.state.errors import StateMismatch
from keepstep.state.state_bytes import save_state
from keepstep_mesh.protocol.manifest import CHUNK_BYTES
from tests.services.relay_transport.scene import switched_off
from tests.support.services.relay_driver import JOB, Client, State, client, relay, relay_process

ROWS = 10
WEIGHTS = torch.arange(ROWS * 3, dtype=torch.float32).view(ROWS, 3)


@contextmanager
def rank_of(rank: int, world: int) -> Iterator[DeviceMesh]:
    """A device mesh of ``world`` ranks, as ``rank`` sees it. Nothing communicates."""
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (world,))
    finally:
        dist.destroy_process_group()


def shard(full: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    size = -(-ROWS // mesh.size())
    local = full[mesh.get_rank() * size : (mesh.get_rank() + 1) * size].clone()
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=full.stride())


def state(mesh: DeviceMesh, full: torch.Tensor, *, trained: bool) -> dict[str, Any]:
    moments = {0: {"exp_avg": shard(full + 100, mesh), "step": torch.tensor(7.0)}} if trained else {}
    optimizer = {"state": moments, "param_groups": [{"lr": 0.5 if trained else 0.1, "params": [0]}]}
    user = {"default": {"model": {"weight": shard(full, mesh)}, "optimizer": optimizer}}
    return {"user": user, "manager": {"step": 7 if trained else 0, "batches_committed": 14, "lineage": 3}}


async def stored(worker: Client) -> AtRelay:
    """Store what two ranks have."""
    await worker.begin("step-7", 7, kind="durable", ranks=2)
    for rank in (0, 1):
        with rank_of(rank, 2) as mesh:
            manifest, pack = save_state(state(mesh, WEIGHTS, trained=True))
        one = State(bytes(pack), manifest)
        assert len(one.pack) < CHUNK_BYTES
        await worker.manifest(one, "step-7", rank=rank)
        await worker.put(one.pack)
    await worker.commit("step-7")
    return AtRelay(worker.address, JOB, "step-7")


async def test_a_relay_that_hangs_or_does_not_have_it_or_sends_damaged_bytes_is_replaced_by_another() -> None:
    memory = {"memory_checkpoints": 1}
    async with relay(**memory) as empty, relay(**memory) as damaged, relay(**memory) as whole:
        for one in (damaged, whole):
            async with client(one.address) as worker:
                await stored(worker)
        for chunk in damaged.chunks.memory.chunks.values():
            chunk[chunk.nbytes // 2] ^= 1
        with switched_off() as hanging, rank_of(1, 2) as mesh:
            for first in (hanging, empty.address, damaged.address):
                into = state(mesh, torch.zeros(ROWS, 3), trained=False)
                location = AtRelay(first, JOB, "step-7", (whole.address,))
                loaded = await asyncio.to_thread(load_resharded, location, into, seconds=3.0, token=None)
                assert loaded["user"]["default"]["model"]["weight"].to_local().equal(WEIGHTS[5:])
        with pytest.raises(CheckpointDamaged, match="is damaged"), rank_of(1, 2) as mesh:
            into = state(mesh, torch.zeros(ROWS, 3), trained=False)
            location = AtRelay(damaged.address, JOB, "step-7")
            await asyncio.to_thread(load_resharded, location, into, seconds=3.0, token=None)


async def test_each_rank_loads_its_new_shard_and_a_new_optimizer_that_of_its_parameter(tmp_path: Path) -> None:
    async with relay_process("--data-dir", str(tmp_path)) as (_, url), client(url) as worker:
        checkpoint = await stored(worker)
        for rank, world in ((0, 1), (3, 4), (2, 3)):
            with rank_of(rank, world) as mesh:
                into = state(mesh, torch.zeros(ROWS, 3), trained=False)
                loaded = await asyncio.to_thread(load_resharded, checkpoint, into, seconds=60.0, token=None)
                expected = state(mesh, WEIGHTS, trained=True)
                ours, theirs = (one["user"]["default"] for one in (loaded, expected))
                assert ours["model"]["weight"] is into["user"]["default"]["model"]["weight"], "in place"
                assert torch.equal(ours["model"]["weight"].to_local(), theirs["model"]["weight"].to_local())
                moments, as_trained = (one["optimizer"]["state"][0] for one in (ours, theirs))
                assert torch.equal(moments["exp_avg"].to_local(), as_trained["exp_avg"].to_local())
                assert moments["exp_avg"].placements == (Shard(0),)
                assert moments["step"] == 7.0
                assert ours["optimizer"]["param_groups"] == theirs["optimizer"]["param_groups"]
                assert loaded["manager"] == expected["manager"]
        with rank_of(0, 1) as mesh:
            into["user"]["default"]["other"] = torch.zeros(1)
            with pytest.raises(StateMismatch, match=r"step-7 does not have \['user\.default\.other'\]"):
                await asyncio.to_thread(load_resharded, checkpoint, into, seconds=60.0, token=None)
            plain = {"user": {"default": {"model": {"weight": torch.zeros(ROWS, 3)}, "optimizer": {}}}}
            with pytest.raises(StateMismatch, match="exp_avg is sharded, and this group has no DTensor"):
                await asyncio.to_thread(load_resharded, checkpoint, plain, seconds=60.0, token=None)


async def test_a_state_by_names_is_sharded_as_the_parameter_of_that_name_and_a_list_may_have_bytes() -> None:
    """Two parameters have one shape, and are sharded in different dimensions."""
    full = torch.arange(16, dtype=torch.float32).view(4, 4)

    def part(mesh: DeviceMesh, dim: int) -> DTensor:
        local = full.chunk(mesh.size(), dim)[mesh.get_rank()].contiguous()
        return DTensor.from_local(local, mesh, [Shard(dim)], run_check=False, shape=full.shape, stride=full.stride())

    def model(mesh: DeviceMesh) -> dict[str, Any]:
        return {"rows": part(mesh, 0), "columns": part(mesh, 1)}

    async with relay(memory_checkpoints=1) as one, client(one.address) as worker:
        await worker.begin("step-1", 1, kind="durable", ranks=2)
        for rank in (0, 1):
            with rank_of(rank, 2) as mesh:
                moments = {name: {"exp_avg": value} for name, value in model(mesh).items()}
                manifest, pack = save_state(
                    {"model": model(mesh), "state": moments, "random": [3, bytes(2048), None], "rank": rank}
                )
            await worker.manifest(State(bytes(pack), manifest), "step-1", rank=rank)
            await worker.put(bytes(pack))
        await worker.commit("step-1")
        with rank_of(3, 4) as mesh:
            location = AtRelay(worker.address, JOB, "step-1")
            loaded = await asyncio.to_thread(load_resharded, location, {"model": model(mesh)}, seconds=60.0, token=None)
        for name, value in loaded["model"].items():
            moment = loaded["state"][name]["exp_avg"]
            assert moment.placements == value.placements
            assert torch.equal(moment.to_local(), value.to_local())
        assert loaded["random"] == [3, bytes(2048), None]
