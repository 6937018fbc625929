"""Save and load a state on one of several ranks, for ``checkpoint_speed.py``.

The state is fp32 tensors: plain ones on one rank, DTensors in even shards on several. In each round the ranks save it,
load it into other memory, and save it in the background. It changes before each save: a relay has none of its chunks.
After the first load they compare every byte. Rank 0 prints the seconds of each operation, which are those of the
slowest rank. ``quarter`` loads a quarter of each tensor instead.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

State = dict[str, Any]


class Dcp:
    """torch.distributed.checkpoint with its defaults: FileSystemWriter and FileSystemReader, files synced."""

    def save(self, state: State, place: str) -> None:
        dcp.save(state, checkpoint_id=place)

    def load(self, state: State, place: str) -> None:
        dcp.load(state, checkpoint_id=place, no_dist=not dist.is_initialized() or dist.get_backend() == "fake")

    def begin(self, state: State, place: str) -> Future[Any]:
        return dcp.async_save(state, checkpoint_id=place)


class Keepstep:
    """``keepstep.checkpoint``. ``sync``: as there."""

    def __init__(self, *, sync: bool = True) -> None:
        self._sync = {} if sync else {"sync": False}

    def save(self, state: State, place: str) -> None:
        from keepstep import checkpoint

        checkpoint.save(state, place, **self._sync)

    def load(self, state: State, place: str) -> None:
        from keepstep import checkpoint

        checkpoint.load(state, place)

    def begin(self, state: State, place: str) -> Future[Any]:
        from keepstep import checkpoint

        return checkpoint.async_save(state, place, **self._sync)


class TorchCheckpointing:
    """Meta's torch_checkpointing.

    Direct I/O is off, because its writer fails on sizes that are not a multiple of a block. The files are not synced.
    The description of shards is off, because it needs CUDA: the checkpoint cannot be resharded.
    """

    def __init__(self) -> None:
        from torch_checkpointing import CheckpointManager, ItemSpec
        from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

        def manager(kind: str) -> Any:
            return CheckpointManager(
                CheckpointManager.Config(
                    items={"model": ItemSpec()},
                    save=_config(kind),
                    storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
                )
            )

        self._now, self._later = manager("Sync"), manager("Async")

    def save(self, state: State, place: str) -> None:
        self._now.save(place, state)

    def load(self, state: State, place: str) -> None:
        loaded = self._now.load(place, into=state)["model"]
        for key, tensor in state["model"].items():
            if loaded[key] is not tensor:  # it returned new tensors, which its user copies into the model
                _local(tensor).copy_(_local(loaded[key]))

    def begin(self, state: State, place: str) -> Future[Any]:
        written = self._later.save(place, state)
        with self._later.lock():  # an optimizer step waits here until the state was copied
            return written


LIBRARIES: dict[str, Any] = {
    "dcp": Dcp,
    "keepstep": Keepstep,
    "keepstep_unsynced": lambda: Keepstep(sync=False),
    "torch_checkpointing": TorchCheckpointing,
}


def _config(kind: str) -> Any:
    from torch_checkpointing import config

    return getattr(config, f"{kind}CheckpointSaverConfig")()


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def state_of(size: int, tensors: int, rank: int, mesh: Any, seed: int | None) -> State:
    """Return ``size`` bytes over all ranks. Without ``seed``, of zeros."""
    ranks = 1 if mesh is None else mesh.size()
    random = torch.Generator().manual_seed(1000 * (seed or 0) + rank)
    model: State = {}
    for number in range(tensors):
        local = torch.zeros(size // 4 // tensors // ranks // 256, 256)
        if seed is not None:
            local.normal_(generator=random)
        model[f"layer{number}"] = local if mesh is None else DTensor.from_local(local, mesh, [Shard(0)])
    return {"model": model}


def change(state: State) -> None:
    """Change every element."""
    for tensor in state["model"].values():
        _local(tensor).add_(1)


def run(options: argparse.Namespace) -> dict[str, list[float]]:
    library = LIBRARIES[options.library]()
    mesh = init_device_mesh("cpu", (options.ranks,)) if options.ranks > 1 else None
    ours = dist.new_group() if mesh is not None else None  # a background save of dcp uses the default group

    def timed(work: Callable[[], Any]) -> tuple[float, Any]:
        if ours is not None:
            dist.barrier(ours)
        began = time.perf_counter()
        result = work()
        seconds = torch.tensor(time.perf_counter() - began)
        if ours is not None:
            dist.all_reduce(seconds, dist.ReduceOp.MAX, ours)
        return seconds.item(), result

    state = state_of(options.size, options.tensors, options.rank, mesh, seed=1)
    into = state_of(options.size, options.tensors, options.rank, mesh, seed=None)
    times: dict[str, list[float]] = {"save": [], "load": [], "blocked": [], "background": []}
    for number in range(options.rounds + 1):
        first, second = (f"{options.place}-{number}{which}" for which in "ab")
        change(state)
        seen = {"save": timed(lambda place=first: library.save(state, place))[0]}
        seen["load"] = timed(lambda place=first: library.load(into, place))[0]
        if number == 0 and not all(
            torch.equal(_local(state["model"][key]), _local(into["model"][key])) for key in state["model"]
        ):
            raise RuntimeError(f"{options.library} loaded other values than it saved")
        change(state)
        began = time.perf_counter()
        seen["blocked"], future = timed(lambda place=second: library.begin(state, place))
        timed(future.result)
        seen["background"] = time.perf_counter() - began
        if number:  # the first round warms up
            for name, seconds in seen.items():
                times[name].append(seconds)
        if ours is not None:
            dist.barrier(ours)
        if options.rank == 0:
            for place in (first, second):
                shutil.rmtree(place, ignore_errors=True)  # a relay's are no folders
    return times


def quarter(options: argparse.Namespace) -> dict[str, list[float]]:
    """Return the bytes read by a rank of four that loads its shard of each tensor, as a share of all bytes."""
    library = LIBRARIES[options.library]()
    library.save(state_of(options.size, options.tensors, 0, None, seed=1), options.place)
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    mesh = init_device_mesh("cpu", (4,))
    into = state_of(options.size, options.tensors, 1, mesh, seed=None)
    before = _bytes_read(options.place)
    library.load(into, options.place)
    read = _bytes_read(options.place) - before
    if Path(options.place).exists():
        shutil.rmtree(options.place)
    return {"share": [read / options.size]}


def _bytes_read(place: str) -> int:
    """Return the bytes that this process has read from files, or that the relay at ``place`` has sent."""
    if place.startswith("http"):
        url = urlsplit(place)._replace(path="/metrics").geturl()
        with urllib.request.urlopen(url, timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return int(float(next(line.split()[1] for line in lines if line.startswith("keepstep_relay_sent_bytes_total"))))
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("--place", required=True, help="path or URL of the checkpoints, without a number")
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--store-port", type=int, default=0)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--tensors", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quarter", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.ranks > 1:
        store = f"tcp://127.0.0.1:{options.store_port}"
        dist.init_process_group("gloo", init_method=store, rank=options.rank, world_size=options.ranks)
    result = quarter(options) if options.quarter else run(options)
    if options.rank == 0:
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
