"""A member of a job with one copy: trains until the file ``STOP`` exists, and prints what a test asks for as JSON."""

from __future__ import annotations

import atexit
import json
import math
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from keepstep.one_copy import OneCopy
from keepstep.one_copy.copies import copy_sender
from keepstep.one_copy.copies.kept_bytes import Memory


def own(name: str, default: str = "") -> str:
    """Return what is special in this member."""
    return os.environ.get(name, default)


def build(mesh: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model. While the file ``BUILD`` does not exist, it takes longer."""
    while own("BUILD") and not Path(own("BUILD")).exists():
        time.sleep(0.01)  # until the test, another process, creates the file
    world, _, special = own("WIDTH_IN_WORLD").partition(":")
    width = int(special if world == str(mesh.size()) else own("WIDTH", "16"))
    model = nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 16))
    if not own("PLAIN"):
        fully_shard(model, mesh=mesh["fsdp"] if mesh.ndim > 1 else mesh)
    kind, rate = own("OPTIMIZER", "AdamW"), float(own("LR", "1e-2"))
    quick = {"fused": True} if kind == "AdamW" else {}  # torch looks at fewer operations on DTensors in the first step
    return model, getattr(torch.optim, kind)(model.parameters(), lr=rate, **quick)


def take(self: Memory, size: int) -> list[memoryview]:
    """Find no memory while the file ``FULL`` exists."""
    if own("FULL") and Path(own("FULL")).exists():
        raise MemoryError
    return take_memory(self, size)


def save(model: nn.Module, step: int) -> None:
    """Gather the model. Once the file ``SAVE``.NAME tells the test that this member does so, it waits for ``SAVE``."""
    Path(f"{own('SAVE')}.{own('REPLICA_GROUP_ID')}").touch()
    while not Path(own("SAVE")).exists():
        time.sleep(0.01)  # until the test, another process, creates the file
    shards: list[Any] = list(model.parameters())
    print(json.dumps({"saved": step, "elements": sum(one.full_tensor().numel() for one in shards)}))


def linger() -> None:
    """End only when the file ``LATE`` exists, although rank 0 has ended."""
    while not Path(own("LATE")).exists():
        time.sleep(0.01)  # until the test, another process, creates the file


if own("LATE") and own("RANK") != "0":
    atexit.register(linger)
take_memory, Memory.take = Memory.take, take  # type: ignore[method-assign]
copy_sender.KEEPER_AGAIN_SECONDS = 0.2
torch.set_num_threads(int(own("THREADS", "1")))
torch.manual_seed(0)
job = OneCopy(
    build,
    mesh=json.loads(own("MESH", "null")),
    copies=int(own("COPIES", "1")),
    memory=int(own("MEMORY")) if own("MEMORY") else None,
    refuse_nonfinite=bool(own("REFUSE")),
    build_timeout=timedelta(seconds=float(own("BUILD_TIMEOUT", "600"))),
)
if own("REGISTER"):
    job.register(own("REGISTER"), nn.Module())
digits = torch.utils.data.TensorDataset(torch.arange(64))
loader = job.loader(digits, int(own("BATCH", "8")), seed=int(own("SEED"))) if own("SEED") else None
last = 1 << 30
stop = Path(os.environ["STOP"])
while job.step < last:
    with job.attempt() as (model, optimizer):
        if own("LR_FROM") == str(job.step):
            optimizer.param_groups[0]["lr"] = 0.5
        end = torch.tensor(float(stop.exists()))
        torch.distributed.all_reduce(end)
        if own("EACH_STEP"):
            loader = job.loader(digits, 8)
        if loader is not None:
            loader.batch()
        model(torch.full((4, 16), float(job.step % 7))).pow(2).mean().backward()
        if own("STEPS"):
            optimizer.step()
        if own("NAN_AT") == str(job.step):
            next(model.parameters()).grad.fill_(math.nan)
        if job.commit():
            print(json.dumps({"step": job.step, "rank": job.rank, "ranks": job.world_size}), flush=True)
            if end > 0:
                last = job.step
            if job.step == 3 and own("SAVES") == "inside":
                save(model, job.step)
    if own("FAILS_AT") == str(job.step):
        raise ValueError("a bug of this member")
    if job.step == 3 and own("SAVES") == "outside":
        save(model, job.step)
    time.sleep(0.02)  # a step would be too short for the test to act in it
saved = own("SAVES") != "at the end"
while not saved:
    with job.attempt() as (model, optimizer):
        save(model, job.step)
        saved = True
job.finish()
job.close()  # as in a finally block
