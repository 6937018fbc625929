"""Train a model on one replica group of several ranks that shard it with FSDP2, for ``hsdp_step.py``.

Blocks of managed and of plain steps alternate in one process, because the speed of a machine changes from one process
to the next by more than the figure. In a managed step the all-reduce hook of FSDP2 averages each shard over the groups
through the Manager, which also asks for the quorum and commits. A plain step is FSDP2 alone. The first step of a block
does not count. At the end rank 0 writes one line for each other step: its kind, its seconds, and the seconds of
processor time of rank 0.
"""

from __future__ import annotations

import argparse
import importlib
import os
import time
from collections.abc import Callable
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
BLOCK = 4
"""Steps of one kind in a row."""
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


def hook_of(library: str, manager: object) -> Callable[[torch.Tensor], None]:
    """Return the all-reduce hook that a script of this library gives to FSDP2."""
    if library == "keepstep":
        return importlib.import_module("keepstep.device_mesh").all_reduce_hook(manager)

    def average(shard: torch.Tensor) -> None:
        manager.allreduce(shard).wait()

    return average


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
    return manager, library.Optimizer(manager, inner)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", choices=("torchft", "keepstep"), required=True)
    parser.add_argument("--lighthouse", required=True)
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
    inner = torch.optim.SGD(model.parameters(), lr=1e-3)
    manager, optimizer = begin(options, model, inner)
    hook = hook_of(options.library, manager)
    inputs = torch.randn(BATCH, FEATURES)
    lines = []
    for step in range(options.steps):
        managed = step // BLOCK % 2 == 0
        for unit in (*model, model):
            unit.set_all_reduce_hook(hook if managed else lambda _: None)
        began, used = time.perf_counter(), time.process_time()
        stepper = optimizer if managed else inner
        stepper.zero_grad()
        model(inputs).square().mean().backward()
        if stepper.step() is False:
            raise RuntimeError("a step did not commit")
        seconds, of_processor = time.perf_counter() - began, time.process_time() - used
        if step % BLOCK:
            lines.append(f"{'managed' if managed else 'plain'} {seconds:.9f} {of_processor:.9f}\n")
    if options.rank == 0:
        Path(options.out).write_text("".join(lines), encoding="ascii")
    manager.shutdown()
    dist.barrier()
    os._exit(0)  # torch sometimes aborts while its threads are torn down


if __name__ == "__main__":
    main()
