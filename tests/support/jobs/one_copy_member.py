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


def build(mesh: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


torch.set_num_threads(1)
torch.manual_seed(0)
memory = os.environ.get("MEMORY")
job = OneCopy(build, memory=int(memory) if memory else None)
last = 1 << 30
stop = Path(os.environ["STOP"])
while job.step < last:
    with job.attempt() as (model, _):
        end = torch.tensor(float(stop.exists()))
        torch.distributed.all_reduce(end)
        model(torch.full((4, 16), float(job.step % 7))).pow(2).mean().backward()
        if job.commit():
            print(json.dumps({"step": job.step, "rank": job.rank, "ranks": job.world_size}), flush=True)
            if end > 0:
                last = job.step
    time.sleep(0.02)
job.finish()
