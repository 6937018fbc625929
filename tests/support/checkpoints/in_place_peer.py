"""One of four ranks that call torch's save and load, keepstep's in their place, and torch's with keepstep as storage.

in_place_peer.py RANK STORE_FILE DIRECTORY
"""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from keepstep import checkpoint
from keepstep.checkpoint import RelayReader, RelayWriter

WORLD = 4
TIMEOUT = timedelta(seconds=60)
RENAMES = 10


@dataclass(frozen=True)
class Way:
    """One way to save and load, and the directory for it."""

    name: str
    save: Callable[..., Any]
    load: Callable[..., Any]
    async_save: Callable[..., Any]
    folder: Path
    numbers: Iterator[int]

    def place(self) -> Path:
        """Return a new directory, equal at all ranks."""
        dist.barrier()
        return self.folder / f"{self.name}-{next(self.numbers)}"


def ways(folder: Path) -> list[Way]:
    def save(state: Any, checkpoint_id: Any, **more: Any) -> None:
        checkpoint.save(state, checkpoint_id, overwrite=True, timeout=TIMEOUT, **more)

    def stored_by(function: Any) -> Callable[..., Any]:
        def call(state: Any, checkpoint_id: Any, **more: Any) -> Any:
            writer = more.pop("storage_writer", None) or RelayWriter(checkpoint_id, overwrite=True, timeout=TIMEOUT)
            return function(state, storage_writer=writer, **more)

        return call

    def load(state: Any, checkpoint_id: Any, **more: Any) -> None:
        dcp.load(state, storage_reader=RelayReader(checkpoint_id, timeout=TIMEOUT), **more)

    def named(function: Any) -> Callable[..., Any]:
        return lambda state, checkpoint_id, **more: function(state, checkpoint_id=checkpoint_id, **more)

    return [
        Way("torch", named(dcp.save), named(dcp.load), named(dcp.async_save), folder, count()),
        Way("keepstep", save, checkpoint.load, checkpoint.async_save, folder, count()),
        Way("storage", stored_by(dcp.save), load, stored_by(dcp.async_save), folder, count()),
    ]


class Collective:
    """Restores itself with a collective: the ranks wait for each other in it."""

    def __init__(self, call: Callable[[], Any], *, saves: bool) -> None:
        self.call = call
        self.saves = saves
        self.loads = 0

    def state_dict(self) -> dict[str, Any]:
        if self.saves:
            self.call()
        return {}

    def load_state_dict(self, _state: dict[str, Any]) -> None:
        self.call()
        self.loads += 1


def collectives_meet(way: Way, rank: int) -> None:
    saves = way.name == "keepstep"  # torch 2.13 calls state_dict in the order of the dict
    state = {
        "sum": Collective(lambda: dist.all_reduce(torch.ones(2)), saves=saves),
        "all": Collective(lambda: dist.all_gather([torch.ones(3)] * WORLD, torch.ones(3)), saves=saves),
    }
    if rank % 2:
        state = dict(reversed(state.items()))
    place = way.place()
    way.save(state, place)
    way.load(state, place)
    assert [one.loads for one in state.values()] == [1, 1]


class Losses:
    """Writes a part of its state to a file in memory."""

    def __init__(self, losses: list[float]) -> None:
        self.losses = losses

    def state_dict(self) -> dict[str, Any]:
        file = io.BytesIO()
        torch.save(self.losses, file)
        return {"losses": file, "count": torch.tensor(len(self.losses))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        state["losses"].seek(0)
        self.losses = torch.load(state["losses"])
        assert len(self.losses) == state["count"].item()


def files_in_memory(way: Way, _rank: int) -> None:
    place, loaded = way.place(), Losses([])
    way.save({"train": Losses([0.5] * 3000)}, place)
    way.load({"train": loaded}, place)
    assert loaded.losses == [0.5] * 3000


def meta_tensors_get_memory(way: Way, _rank: int) -> None:
    mesh, place = init_device_mesh("cpu", (WORLD,)), way.place()
    whole = torch.arange(27.0).view(9, 3)
    saved = {"w": distribute_tensor(whole, mesh, [Shard(0)]), "p": torch.arange(5.0)}
    into: Any = {"inner": {key: torch.empty_like(value, device="meta") for key, value in saved.items()}}
    way.save({"inner": saved}, place)
    way.load(into, place)
    assert into["inner"]["w"].full_tensor().equal(whole)
    assert into["inner"]["p"].equal(torch.arange(5.0))


def places_are_used_again(way: Way, rank: int) -> None:
    place = way.place()
    mesh = init_device_mesh("cpu", (2, 2))
    whole = torch.arange(16.0).view(4, 4)
    layouts: list[list[Any]] = [[Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(1), Replicate()]]
    for number, placements in enumerate(layouts):
        state = {"w": distribute_tensor(whole + number, mesh, placements), "old": torch.ones(3000 * (number == 0))}
        if number % 2:
            way.save(state, place, planner=DefaultSavePlanner())
        else:
            way.save(state, place)
        for other in layouts:
            into = {"w": distribute_tensor(torch.zeros(4, 4), mesh, other)}
            way.load(into, place, planner=DefaultLoadPlanner()) if number % 2 else way.load(into, place)
            assert into["w"].full_tensor().equal(whole + number)
    dist.barrier()
    refused: dict[str, Callable[[], Any]] = {
        "torch": lambda: dcp.save({"x": 1}, storage_writer=dcp.FileSystemWriter(place, overwrite=False)),
        "keepstep": lambda: checkpoint.save({"x": 1}, place, timeout=TIMEOUT),
        "storage": lambda: dcp.save({"x": 1}, storage_writer=RelayWriter(place, timeout=TIMEOUT)),
    }
    with pytest.raises(CheckpointException) as raised:
        refused[way.name]()
    assert rank in raised.value.failures or way.name == "torch"


def a_directory_may_be_renamed_at_once(way: Way, rank: int) -> None:
    for number in range(RENAMES):
        place = way.place()
        way.save({"a": torch.ones(10), "b": torch.ones(5)}, place)
        if rank == number % WORLD:
            place.rename(f"{place}-done")
        dist.barrier()
        into = {"a": torch.zeros(10)}
        way.load(into, f"{place}-done")
        assert into["a"].sum() == 10


class FailingWriter(dcp.StorageWriter):
    """A storage of the user, which fails on rank 1."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def reset(self, checkpoint_id: Any = None) -> None:
        del checkpoint_id

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        del is_coordinator, args, kwargs

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: Any) -> Any:
        return plans

    def write_data(self, plan: Any, planner: Any) -> Any:
        del plan, planner
        if self.rank == 1:
            raise ValueError("the disk of the user")
        future: Any = torch.futures.Future()
        future.set_result([])
        return future

    def finish(self, metadata: Any, results: Any) -> None:
        del metadata, results

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        del checkpoint_id
        return True


class Odd:
    """A value that a checkpoint cannot store."""


def failures_name_the_rank(way: Way, rank: int) -> None:
    with pytest.raises(CheckpointException) as raised:
        way.save({"w": torch.ones(2)}, None, storage_writer=FailingWriter(rank))
    assert [(one, type(why[0])) for one, why in raised.value.failures.items()] == [(1, ValueError)]
    if way.name == "keepstep":
        assert isinstance(raised.value, checkpoint.CheckpointError)
        place = way.place()
        with pytest.raises(CheckpointException, match="Odd, which a checkpoint cannot store") as raised:
            way.save({"w": torch.ones(2), f"of.{rank}": Odd() if rank == 1 else 1}, place)
        assert list(raised.value.failures) == [1]
    with pytest.raises(CheckpointException):
        way.load({"w": torch.ones(2)}, way.place())


def a_storage_may_be_the_second_argument(way: Way, _rank: int) -> None:
    functions: Any = {"torch": dcp, "keepstep": checkpoint}.get(way.name)
    if functions is not None:
        place, into = way.place(), {"x": torch.zeros(2)}
        functions.save({"x": torch.ones(2)}, RelayWriter(place, timeout=TIMEOUT))
        functions.load(into, RelayReader(place, timeout=TIMEOUT))
        assert into["x"].sum() == 2


def shards_in_tuples_are_not_lost(way: Way, _rank: int) -> None:
    shard = distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (WORLD,)), [Shard(0)])
    place = way.place()
    if way.name != "torch":  # which stores the shard of one rank, and gives it to all
        for value in ((shard, 1), {"inner": (shard,)}):
            with pytest.raises(CheckpointException, match="tuple with a shard of a tensor in it"):
                way.save({"pair": value}, place)
            dist.barrier()


def a_group_and_one_rank_save_alone(way: Way, rank: int) -> None:
    mesh, whole = init_device_mesh("cpu", (2, 2)), torch.arange(12.0).view(6, 2)
    saved = distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
    for first in (0, 2):
        place = way.place()
        if first <= rank < first + 2:
            way.save({"w": saved, "first": first}, place, process_group=mesh.get_group(1))
        dist.barrier()
        into: Any = {"w": distribute_tensor(torch.zeros(6, 2), mesh, [Shard(0), Shard(1)]), "first": -1}
        way.load(into, place)
        assert into["w"].full_tensor().equal(whole)
        assert into["first"] == first
    place = way.place()
    if rank == 3:
        way.save({"x": torch.ones(3)}, place, no_dist=True)
    dist.barrier()
    alone = {"x": torch.zeros(3)}
    way.load(alone, place, no_dist=True)
    assert alone["x"].sum() == 3
    if way.name == "keepstep":
        with pytest.raises(checkpoint.CheckpointError, match=r"w: ranks \d, \d hold shards of it, but are not in proc"):
            whole_mesh = distribute_tensor(whole, mesh, [Shard(1), Shard(0)])
            way.save({"w": whole_mesh}, way.place(), process_group=mesh.get_group(1))


def sharded_tensors_are_cut_in_other_ways(way: Way, rank: int) -> None:
    rows = [(0, 8, 1), (8, 2, 0)]
    specs = [
        ChunkShardingSpec(dim=0, placements=[f"rank:{one}" for one in (0, 1, 3, 2)]),
        ChunkShardingSpec(dim=1, placements=["rank:1", "rank:0"]),
        EnumerableShardingSpec([ShardMetadata([at, 0], [size, 6], placement=f"rank:{one}") for at, size, one in rows]),
    ]
    place = way.place()
    for spec in specs:
        saved = sharded_tensor.rand(spec, 10, 6)
        way.save({"st": saved, "plain": torch.ones(2)}, place)
        for other in specs:
            loaded = sharded_tensor.zeros(other, 10, 6)
            way.load({"st": loaded}, place)
            whole: Any = [torch.zeros(10, 6) if rank == 0 else None for _ in range(2)]
            for tensor, one in zip((saved, loaded), whole, strict=True):
                tensor.gather(out=one)
            assert whole[0] is None or whole[0].equal(whole[1])


def trained(seed: int, steps: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: Any = fully_shard(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
    return model, optimizer


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for key in sorted(value, key=str) for leaf in leaves(value[key])]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in leaves(item)]
    return [value.full_tensor() if hasattr(value, "full_tensor") else value]


def same(one: Any, other: Any) -> bool:
    pairs = zip(leaves(one), leaves(other), strict=True)
    return all(a.equal(b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


def state_dicts_of_torch_come_back(way: Way, _rank: int) -> None:
    for options in (StateDictOptions(), StateDictOptions(flatten_optimizer_state_dict=True)):
        (model, optimizer), (other, stateless) = trained(1, 2), trained(2, 0)
        saved = dict(zip(("model", "optim"), get_state_dict(model, optimizer, options=options), strict=True))
        into: Any = dict(zip(("model", "optim"), get_state_dict(other, stateless, options=options), strict=True))
        place, before = way.place(), dict(into)
        way.save(saved, place)
        way.load(into, place)
        assert all(into[key] is before[key] for key in into)
        set_state_dict(
            *(other, stateless),
            model_state_dict=into["model"],
            optim_state_dict=into["optim"],
            options=options,
        )
        assert same(get_state_dict(model, optimizer), get_state_dict(other, stateless))


def copies_of_torch_are_saved(way: Way, _rank: int) -> None:
    model, _ = trained(1, 2)
    for in_background in (False, True):
        stager = DefaultStager(StagingOptions(False, False, in_background, False))
        place, into = way.place(), {"model": trained(2, 0)[0].state_dict()}
        saving = way.async_save(
            {"model": model.state_dict()},
            place,
            async_checkpointer_type=AsyncCheckpointerType.THREAD,
            async_stager=stager,
        )
        (saving.upload_completion if in_background else saving).result(60)
        stager.close()
        way.load(into, place)
        assert same(into["model"], model.state_dict())


CHECKS = [
    *(collectives_meet, files_in_memory, meta_tensors_get_memory, places_are_used_again),
    *(a_directory_may_be_renamed_at_once, failures_name_the_rank, shards_in_tuples_are_not_lost),
    *(a_group_and_one_rank_save_alone, sharded_tensors_are_cut_in_other_ways, state_dicts_of_torch_come_back),
    *(copies_of_torch_are_saved, a_storage_may_be_the_second_argument),
]


def main(rank: int, store: str, folder: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD)
    for check in CHECKS:
        for way in ways(Path(folder) / check.__name__):
            print(check.__name__, way.name, file=sys.stderr, flush=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # those of torch
                check(way, rank)
    dist.barrier()
    dist.destroy_process_group()
    print("ok", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
