"""One of two ranks that hold DTensors: moves its shards to other DTensors, and tries what must be refused.

sharded_peer.py RANK STORE_FILE
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from keepstep.checkpointing import HTTPTransport, StateMismatch
from keepstep.state.state_bytes import load_state, save_state, state_root
from keepstep.state.state_manifest import read_manifest


def refused(manifest: bytes, pack: Any, into: Any) -> str:
    try:
        load_state(manifest, pack, into)
    except StateMismatch as error:
        return str(error)
    raise AssertionError("it was loaded")


def main(rank: int, store: str) -> None:
    with two_ranks(rank, store):
        shards_are_restored_in_place(rank)
        dtensors_are_built_on_the_mesh_of_the_process()
        what_an_optimizer_lacks_is_built_on_the_mesh_of_its_parameters()
        two_meshes_that_fit_are_refused()
        both_forms_of_an_fsdp_optimizer_heal_into_one_without_state(shard_mesh())
    meshes_without_process_groups_do_not_count(rank, store)
    print("ok", flush=True)


@contextmanager
def two_ranks(rank: int, store: str) -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    yield
    dist.destroy_process_group()


def shard_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))


def moved(state: Any, into: Any = None) -> Any:
    """``state`` after its way through a transport."""
    source: HTTPTransport[Any] = HTTPTransport(timedelta(seconds=60), 0, "127.0.0.1")
    try:
        source.send_checkpoint([1], 1, state, timedelta(seconds=60))
        return source.recv_checkpoint(0, source.metadata(), 1, timedelta(seconds=60), into=into)
    finally:
        source.shutdown()


def shards_are_restored_in_place(rank: int) -> None:
    mesh = shard_mesh()
    full = torch.arange(15.0).reshape(5, 3)
    sharded = distribute_tensor(full, mesh, [Shard(0)])
    manifest, pack = save_state({"w": sharded})
    sharding = read_manifest(manifest).content.tensors[0].sharding
    assert sharding is not None
    assert sharding.global_shape == (5, 3)
    assert sharding.global_offset == (3 * rank, 0)
    assert len(pack) == (36 if rank == 0 else 24)

    target = distribute_tensor(torch.zeros(5, 3), mesh, [Shard(0)])
    place = target.to_local().data_ptr()
    loaded = load_state(manifest, pack, {"w": target})
    assert loaded["w"] is target
    assert target.to_local().data_ptr() == place
    assert target.full_tensor().equal(full)

    other = distribute_tensor(torch.zeros(5, 3), mesh, [Replicate()])
    assert "is sharded as" in refused(manifest, pack, {"w": other})
    assert "but Tensor here: pass `into`" in refused(manifest, pack, {"w": full})


def dtensors_are_built_on_the_mesh_of_the_process() -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("outer", "inner"))
    full = torch.arange(15.0).reshape(5, 3)
    state: dict[str, Any] = {
        "uneven": distribute_tensor(full, mesh, [Shard(0), Replicate()]),
        "columns": distribute_tensor(full, mesh, [Replicate(), Shard(1)]),
        "both": distribute_tensor(full, mesh, [Shard(0), Shard(1)]),
        "transposed": distribute_tensor(full, mesh, [Shard(0), Replicate()]).t(),
        "part": distribute_tensor(full, mesh["outer"], [Shard(1)]),
    }
    state["tied"] = state["uneven"]
    received = moved(state)
    assert received["tied"] is received["uneven"]
    for name, sent in state.items():
        got = received[name]
        assert isinstance(got, DTensor), name
        assert got.device_mesh == sent.device_mesh, name
        assert got.placements == sent.placements, name
        assert (got.shape, got.stride()) == (sent.shape, sent.stride()), name
        assert got.full_tensor().equal(sent.full_tensor()), name


def what_an_optimizer_lacks_is_built_on_the_mesh_of_its_parameters() -> None:
    mesh = shard_mesh()
    weights: list[Any] = [torch.nn.Parameter(distribute_tensor(torch.ones(5, 3), mesh, [Shard(0)])) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], momentum=0.5) for weight in weights]
    weights[0].grad = weights[0].detach().clone()
    optimizers[0].step()
    states = [{"w": w.detach(), "o": o.state_dict()} for w, o in zip(weights, optimizers, strict=True)]
    optimizers[1].load_state_dict(moved(*states)["o"])
    for weight, optimizer in zip(weights, optimizers, strict=True):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert weights[1].full_tensor().equal(weights[0].full_tensor())


def two_meshes_that_fit_are_refused() -> None:
    forth, back = (DeviceMesh("cpu", ranks, mesh_dim_names=("copies",)) for ranks in ([0, 1], [1, 0]))
    manifest, pack = save_state({"w": distribute_tensor(torch.ones(3), forth, [Replicate()])})
    assert "2 device meshes of this process fit it" in refused(manifest, pack, None)
    target = distribute_tensor(torch.zeros(3), back, [Replicate()])
    assert load_state(manifest, pack, {"w": target})["w"] is target

    # a parameter with the same layout decides which mesh its state in the optimizer gets
    state: dict[str, Any] = {"w": distribute_tensor(torch.ones(3), forth, [Replicate()])}
    state["m"] = state["w"].clone()
    other = distribute_tensor(torch.zeros(4), forth, [Replicate()])
    received = load_state(*save_state({**state, "other": other}), {"w": target, "other": other})
    assert received["m"].device_mesh.mesh.tolist() == [1, 0]
    assert received["m"].full_tensor().equal(torch.ones(3))


def both_forms_of_an_fsdp_optimizer_heal_into_one_without_state(mesh: DeviceMesh) -> None:
    flat = StateDictOptions(flatten_optimizer_state_dict=True)

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 1))  # shards of 3 and 2 rows, 1 and 0
        for layer in (*model, model):
            fully_shard(layer, mesh=mesh)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        model(torch.arange(6.0).reshape(2, 3)).square().sum().backward()
        optimizer.step()

    def plain(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    ahead = build()
    for _ in range(3):
        train(*ahead)
    by_name, by_number = build(), build()
    model_state, optimizer_state = moved(get_state_dict(*ahead, options=flat), get_state_dict(*by_name, options=flat))
    set_state_dict(*by_name, model_state_dict=model_state, optim_state_dict=optimizer_state, options=flat)
    assert not by_number[1].state
    received = moved(plain(*ahead), plain(*by_number))
    by_number[0].load_state_dict(received["model"])
    by_number[1].load_state_dict(received["optimizer"])
    for group in (ahead, by_name, by_number):
        train(*group)
    roots = [state_root(plain(*group)) for group in (ahead, by_name, by_number)]
    assert roots[0] == roots[1] == roots[2]
    for parameter in by_number[0].parameters():
        assert by_number[1].state[parameter]["step"].item() == 4


def meshes_without_process_groups_do_not_count(rank: int, store: str) -> None:
    with two_ranks(rank, store + "2"):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("again",))
        manifest, pack = save_state({"w": distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])})
    assert "no device mesh of this process fits it: create the mesh with init_device_mesh" in refused(
        manifest, pack, None
    )
    with two_ranks(rank, store + "3"):
        assert load_state(manifest, pack)["w"].full_tensor().equal(torch.arange(4.0))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
