"""A member of a job with one copy: trains until the file ``STOP`` exists, and prints what a test asks for as JSON."""

from __future__ import annotations

import json
import os
import time
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
    world, _, special = own("WIDTH_IN_WORLD").partition(":")
    width = int(special if world == str(mesh.size()) else own("WIDTH", "16"))
    model = nn.Sequential(nn.Linear(16, width), nn.Tanh(), nn.Linear(width, 16))
    fully_shard(model, mesh=mesh["fsdp"] if mesh.ndim > 1 else mesh)
    return model, getattr(torch.optim, own("OPTIMIZER", "AdamW"))(model.parameters(), lr=float(own("LR", "1e-2")))


def take(self: Memory, size: int) -> list[memoryview]:
    """Find no memory while the file ``FULL`` exists."""
    if own("FULL") and Path(own("FULL")).exists():
        raise MemoryError
    return take_memory(self, size)


take_memory, Memory.take = Memory.take, take  # type: ignore[method-assign]
copy_sender.KEEPER_AGAIN_SECONDS = 0.2
torch.set_num_threads(int(own("THREADS", "1")))
torch.manual_seed(0)
job = OneCopy(
    build,
    mesh=json.loads(own("MESH", "null")),
    copies=int(own("COPIES", "1")),
    memory=int(own("MEMORY")) if own("MEMORY") else None,
)
last = 1 << 30
stop = Path(os.environ["STOP"])
while job.step < last:
    with job.attempt() as (model, optimizer):
        if own("LR_FROM") == str(job.step):
            optimizer.param_groups[0]["lr"] = 0.5
        end = torch.tensor(float(stop.exists()))
        torch.distributed.all_reduce(end)
        model(torch.full((4, 16), float(job.step % 7))).pow(2).mean().backward()
        if job.commit():
            print(json.dumps({"step": job.step, "rank": job.rank, "ranks": job.world_size}), flush=True)
            if end > 0:
                last = job.step
    time.sleep(0.02)
job.finish()
