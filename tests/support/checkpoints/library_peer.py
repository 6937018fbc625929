"""Saves or loads one sharded state, with Megatron Core or with keepstep: both have the same API.

``python library_peer.py LIBRARY ACTION LAYOUT DIRECTORY [ACTION LAYOUT DIRECTORY ...]`` forks a process for each
rank, one action after the other. The Python of either library runs it, so it imports nothing of tests.

* LIBRARY: megatron, keepstep.
* ACTION: save, load. A load compares every value.
* LAYOUT: ``TPxDP``: number of tensor-parallel and data-parallel ranks; with ``f`` behind it, flattened ranges too; with
  ``z``, as zarr, without a scalar, which Megatron Core cannot store so.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

LAYERS = 3


class World:
    """The state of one rank."""

    def __init__(self, library: str, layout: str, rank: int) -> None:
        package = "megatron.core.dist_checkpointing" if library == "megatron" else "keepstep.sharded"
        self.library, self.entry = library, importlib.import_module(package)
        self.mapping = importlib.import_module(f"{package}.mapping")
        self.optimizer = importlib.import_module(f"{package}.optimizer")
        self.flattened = layout.endswith("f")
        self.is_zarr = layout.endswith("z")
        self.tp, self.dp = map(int, layout.rstrip("fz").split("x"))
        self.size = self.tp * self.dp
        self.rank, self.at_tp, self.at_dp = rank, rank % self.tp, rank // self.tp
        self.is_save = True

    def part(self, key: str, shape: tuple[int, ...], dtype: torch.dtype, axis: int | None) -> torch.Tensor:
        """Return the part of this rank of a global tensor whose values follow from its key; zeros for a load."""
        start = sum(map(ord, key)) % 50
        count = torch.Size(shape).numel()
        values = torch.arange(start, start + count, dtype=torch.float32).reshape(shape).to(dtype)
        local = values if axis is None else values.chunk(self.tp, axis)[self.at_tp].contiguous()
        return local if self.is_save else torch.zeros_like(local)

    def tensor(self, key: str, shape: tuple[int, ...], axis: int | None = None, dtype: Any = torch.float32) -> Any:
        offsets = () if axis is None else ((axis, self.at_tp, self.tp),)
        replica = self.at_dp if axis is not None else (0, self.at_tp, self.at_dp)
        data = self.part(key, shape, dtype, axis)
        return self.mapping.ShardedTensor.from_rank_offsets(key, data, *offsets, replica_id=replica)

    def layer(self, number: int) -> Any:
        """A layer of a stack: the global tensor has an axis more."""
        data = self.part(f"layer{number}", (4, 8), torch.float32, 0)
        offsets = ((0, number, LAYERS), (1, self.at_tp, self.tp))
        return self.mapping.ShardedTensor.from_rank_offsets(
            "layers", data, *offsets, replica_id=self.at_dp, prepend_axis_num=1
        )

    def fused(self) -> Any:
        """A fused weight that is stored in two halves."""

        def build(key: str, data: torch.Tensor, replica_id: Any, flattened_range: Any = None) -> dict[str, Any]:
            del flattened_range
            make = self.mapping.ShardedTensor.from_rank_offsets
            return {
                name: make(f"{key}.{name}", half, (0, self.at_tp, self.tp), replica_id=replica_id)
                for name, half in zip("wv", data.chunk(2), strict=True)
            }

        def merge(halves: dict[str, torch.Tensor]) -> torch.Tensor:
            return torch.cat([halves["w"], halves["v"]])

        data = torch.cat([self.part(f"fused.{name}", (4, 4), torch.float32, 0) for name in "wv"])
        return self.mapping.ShardedTensorFactory("fused", data, build, merge, replica_id=self.at_dp)

    def flat(self) -> Any:
        """The slice of a data-parallel rank of a flattened tensor-parallel part."""
        whole = self.part("flat", (8, 6), torch.float32, 0)
        size = whole.numel()
        part = slice(size * self.at_dp // self.dp, size * (self.at_dp + 1) // self.dp)
        return self.mapping.ShardedTensor.from_rank_offsets_flat(
            "flat", whole.flatten()[part], tuple(whole.shape), (0, self.at_tp, self.tp), flattened_range=part
        )

    def optimizer_state(self, model: dict[str, Any], parameters: list[torch.nn.Parameter]) -> dict[str, Any]:
        """Adam's state of the parameters of ``model``, with their sharding."""
        adam = torch.optim.Adam(parameters, lr=0.5)
        for number, parameter in enumerate(parameters):
            adam.state[parameter] = {
                "step": torch.tensor(3.0),
                "exp_avg": torch.full_like(parameter, 1.0 + number) if self.is_save else torch.zeros_like(parameter),
            }
        state = adam.state_dict()
        ids = self.optimizer.get_param_id_to_sharded_param_map(model, parameters)
        self.optimizer.optim_state_to_sharding_state(state, ids, exclude_keys=("step",))
        return state

    def state(self, *, is_save: bool) -> dict[str, Any]:
        self.is_save = is_save
        model = {
            "embedding": self.tensor("embedding", (8, 4), 0),
            "projection": self.tensor("projection", (4, 8), 1, torch.bfloat16),
            "norm": self.tensor("norm", (5,)),
            "scalar": self.tensor("scalar", ()),
            "layers": [self.layer(number) for number in range(LAYERS)],
            "fused": self.fused(),
        }
        if self.is_zarr:
            del model["scalar"]
        with_state = {name: model[name] for name in ("embedding", "norm")}
        parameters = [torch.nn.Parameter(one.data) for one in with_state.values()]
        for one, parameter in zip(with_state.values(), parameters, strict=True):
            one.data = parameter
        state: dict[str, Any] = {
            "model": model,
            "optimizer": self.optimizer_state(with_state, parameters),
            "rng": self.mapping.ShardedObject("rng", {"seed": 5} if is_save else None, (1,), (0,), self.rank),
            "local": self.mapping.LocalNonpersistentObject(f"rank {self.rank}"),
        }
        if is_save:
            state |= {"iteration": 7, "settings": {"lr": 0.5, "betas": (0.9, 0.95), "rate": torch.tensor(2.0)}}
        if self.flattened:
            state["flat"] = self.flat()
        return state

    def save(self, directory: str) -> None:
        backend = ("zarr" if self.is_zarr else "torch_dist", 1)
        self.entry.save(self.state(is_save=True), directory, backend, content_metadata={"version": 2})

    def load(self, directory: str) -> None:
        loaded = self.entry.load(self.state(is_save=False), directory)
        expected = self.state(is_save=True)
        model = loaded["model"]
        for name in {"embedding", "projection", "norm", "scalar"} & set(model):
            assert torch.equal(model[name], expected["model"][name].data), (name, model[name])
        for one, other in zip(model["layers"], expected["model"]["layers"], strict=True):
            assert torch.equal(one, other.data), one
        assert torch.equal(model["fused"], expected["model"]["fused"].data), model["fused"]
        for number, one in expected["optimizer"]["state"].items():
            assert torch.equal(loaded["optimizer"]["state"][number]["exp_avg"], one["exp_avg"].data), number
        assert loaded["rng"] == {"seed": 5}, loaded["rng"]
        assert loaded["local"] == f"rank {self.rank}"
        assert loaded["iteration"] == 7
        assert loaded["settings"] == {"lr": 0.5, "betas": (0.9, 0.95), "rate": torch.tensor(2.0)}
        assert self.entry.load_content_metadata(directory) == {"version": 2}
        if self.flattened:
            assert torch.equal(loaded["flat"], expected["flat"].data), loaded["flat"]
        metadata = self.entry.load_tensors_metadata(directory)
        assert tuple(metadata["layers"].global_shape) == (LAYERS, 4, 8), metadata["layers"]
        assert torch.equal(self.entry.load_plain_tensors(directory)["norm"], expected["model"]["norm"].data)


def be_rank(library: str, action: str, layout: str, directory: str, rank: int) -> None:
    """Do one action as one rank."""
    world = World(library, layout, rank)
    store = dist.FileStore(f"{directory}.{action}.{layout}.{os.getppid()}", world.size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world.size)
    Path(directory).mkdir(exist_ok=True)
    dist.barrier()
    getattr(world, action)(directory)
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    library, *rest = sys.argv[1:]
    if library == "megatron":  # it expects CUDA and numpy 1
        setattr(np, "product", np.prod)  # noqa: B010  ruff takes the plain form for a use of it
        torch.cuda.synchronize = lambda *_, **__: None
        torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment,return-value]
    torch.set_num_threads(1)
    World(library, "1x1", 0)  # imports the library before the forks
    failures = 0
    for action, layout, directory in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        ranks = [
            multiprocessing.get_context("fork").Process(target=be_rank, args=(library, action, layout, directory, rank))
            for rank in range(World(library, layout, 0).size)
        ]
        for one in ranks:
            one.start()
        for one in ranks:
            one.join()
        failed = any(one.exitcode for one in ranks)
        print("failed" if failed else "ok", library, action, layout, directory, flush=True)
        failures += failed
    return failures


if __name__ == "__main__":
    sys.exit(main())
