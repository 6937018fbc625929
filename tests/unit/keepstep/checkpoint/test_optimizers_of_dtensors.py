"""Optimizers of DTensors: one that has not stepped yet gets its shards, and wrapped shards are refused by name."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor, Shard

from keepstep.checkpoint import StoredCheckpoint
from keepstep.checkpoint.completing import complete
from keepstep.checkpoint.loading import load_leaves
from keepstep.checkpointing import UnsupportedValue
from keepstep.state.state_bytes import load_state, save_state
from tests.support.checkpoints.sharded_worlds import fake_rank, in_memory, parts_of
from tests.support.models.wrapped_tensor import parts, scaled


def optimizer_of(rank, world_size, seed):
    """Return an AdamW of a parameter of shape (8, 3), cut along its first axis."""
    mesh = torch.distributed.init_device_mesh("cpu", (world_size,), mesh_dim_names=("tensor",))
    whole = torch.randn(8, 3, generator=torch.Generator().manual_seed(seed))
    shard = whole.chunk(world_size)[rank].clone()
    weight = torch.nn.Parameter(DTensor.from_local(shard, mesh, [Shard(0)], run_check=False))
    return torch.optim.AdamW([weight], foreach=False), weight, whole


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_an_optimizer_without_state_gets_its_shards(world_size):
    saved = []
    for rank in range(2):
        with fake_rank(rank, 2):
            optimizer, weight, whole = optimizer_of(rank, 2, 0)
            weight.grad = weight.detach().clone()
            optimizer.step()
            saved.append(parts_of({"optimizer": optimizer.state_dict()}))
    stored = StoredCheckpoint(in_memory(saved))
    for rank in range(world_size):
        with fake_rank(rank, world_size):
            optimizer, weight, _ = optimizer_of(rank, world_size, 1)
            state = optimizer.state_dict()
            complete(optimizer, state, ("optimizer",), stored)
            load_leaves({"optimizer": state}, stored, strict=True)
            optimizer.load_state_dict(state)
            exp_avg = optimizer.state[weight]["exp_avg"]
            assert exp_avg.placements == weight.placements
            torch.testing.assert_close(exp_avg.to_local(), 0.1 * whole.chunk(world_size)[rank])
            assert optimizer.state[weight]["step"] == 1


def test_a_load_makes_new_shards_without_a_plan_of_torch(monkeypatch):
    """Two threads that plan crash a process with a CUDA build of torch 2.11 and no GPU: each enters such a mode."""

    def entered(_mode):
        raise AssertionError("a FakeTensorMode was entered")

    saved = []
    for rank in range(2):
        with fake_rank(rank, 2):
            optimizer, weight, whole = optimizer_of(rank, 2, 0)
            weight.grad = weight.detach().clone()
            optimizer.step()
            saved.append(parts_of({"optimizer": optimizer.state_dict(), "weight": weight.detach()}))
            updated = weight.detach().to_local().clone()
    stored = StoredCheckpoint(in_memory(saved))
    with fake_rank(1, 2):
        optimizer, weight, _ = optimizer_of(1, 2, 1)
        without_memory = torch.empty(4, 3, device="meta").t().contiguous().t()
        meta = DTensor.from_local(without_memory, weight.device_mesh, [Shard(0)], shape=weight.shape, stride=(1, 8))
        state = {"optimizer": optimizer.state_dict(), "weight": meta}
        monkeypatch.setattr(FakeTensorMode, "__enter__", entered)
        with ThreadPoolExecutor(1) as thread:
            thread.submit(complete, optimizer, state["optimizer"], ("optimizer",), stored).result(60)
            thread.submit(load_leaves, state, stored, strict=True).result(60)
        monkeypatch.undo()
        exp_avg, new = state["optimizer"]["state"][0]["exp_avg"], state["weight"]
        for one in (exp_avg, new):
            assert (one.placements, one.shape, one.requires_grad) == (weight.placements, weight.shape, False)
            assert one.device.type == "cpu"
        assert (new.stride(), new.to_local().stride()) == ((1, 8), (1, 4))
        torch.testing.assert_close(exp_avg.to_local(), 0.1 * whole.chunk(2)[1])
        torch.testing.assert_close(new.to_local(), updated)


def test_a_shard_that_wraps_others_heals_and_is_refused_by_a_checkpoint_of_several_ranks():
    with fake_rank(1, 2):
        mesh = torch.distributed.init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))

        def sharded(seed):
            plain = DTensor.from_local(torch.zeros(4, 8, dtype=torch.bfloat16), mesh, [Shard(0)], run_check=False)
            plain._local_tensor = scaled(seed)
            return plain

        source, here = sharded(1), sharded(2)
        manifest, pack = save_state({"exp_avg": source})
        assert load_state(manifest, bytes(pack), {"exp_avg": here})["exp_avg"] is here
        assert parts(here._local_tensor) == parts(scaled(1))
        with pytest.raises(UnsupportedValue, match=r"exp_avg is a DTensor whose shards are .*RegisteredTensor"):
            parts_of({"exp_avg": source})
