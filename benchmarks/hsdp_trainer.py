"""Train a model on one replica group of several ranks that shard it with FSDP2, for ``hsdp_step.py``.

All libraries share the loop. ``--library plain`` is FSDP2 alone; with keepstep and torchft the all-reduce hook of FSDP2
averages each shard over the groups through the Manager. At the end rank 0 writes one line for each step: its seconds,
and the seconds of processor time of rank 0.
"""

from __future__ import annotations

import argparse
import importlib
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

FEATURES = 1024
LAYERS = 4
BATCH = 64
TIMEOUT = timedelta(seconds=60)


def network(ranks: int) -> nn.Sequential:
    """Return a model of 4.2 million parameters, with one FSDP2 unit for each layer."""
    torch.manual_seed(0)
    model = nn.Sequential()
    for _ in range(LAYERS):
        model.append(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU()))
    mesh = init_device_mesh("cpu", (ranks,))
    for unit in (*model, model):
        fully_shard(unit, mesh=mesh)
    return model


def average_over_groups(library: str, model: nn.Module, manager: object) -> None:
    if library == "keepstep":
        importlib.import_module("keepstep.device_mesh").average_over_groups(model, manager)
        return

    def average(shard: torch.Tensor) -> None:
        manager.allreduce(shard).wait()

    for unit in (*model, model):
        unit.set_all_reduce_hook(average)


def begin(options: argparse.Namespace, model: nn.Module, inner: torch.optim.Optimizer) -> tuple[object, object]:
    """Return the Manager and the optimizer that commits its steps."""
    library = importlib.import_module(options.library)
    process_group = importlib.import_module(f"{options.library}.process_group")

    def load(state: dict[str, object]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = library.Manager(
        pg=process_group.ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        timeout=TIMEOUT,
        replica_id="group_0",
    )
    average_over_groups(options.library, model, manager)
    return manager, library.Optimizer(manager, inner)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", choices=("plain", "torchft", "keepstep"), required=True)
    parser.add_argument("--lighthouse", default="")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--store-port", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.update(  # torchrun's environment of every rank
        RANK=str(options.rank),
        WORLD_SIZE=str(options.ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(options.store_port),
        TORCHFT_LIGHTHOUSE=options.lighthouse,
    )
    dist.init_process_group("gloo")
    model = network(options.ranks)
    optimizer = inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    manager = None
    if options.library != "plain":
        manager, optimizer = begin(options, model, inner)
    inputs = torch.randn(BATCH, FEATURES)
    lines = []
    for _ in range(options.steps):
        began, used = time.perf_counter(), time.process_time()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        if optimizer.step() is False:
            raise RuntimeError("a step did not commit")
        lines.append(f"{time.perf_counter() - began:.9f} {time.process_time() - used:.9f}\n")
    if options.rank == 0:
        Path(options.out).write_text("".join(lines), encoding="ascii")
    if manager is not None:
        manager.shutdown()
    dist.barrier()
    os._exit(0)  # torch sometimes aborts while its threads are torn down


if __name__ == "__main__":
    main()
