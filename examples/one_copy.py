"""Train a model that exists once: keepstep run --replicas 4 --spares 1 -- examples/one_copy.py"""

import hashlib
import os
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from keepstep.one_copy import OneCopy

BATCH, EVERY, PAUSE = 48, int(os.environ.get("EVERY", "25")), float(os.environ.get("PAUSE", "0"))

torch.set_num_threads(1)
pixels, labels = map(torch.tensor, load_digits(return_X_y=True))


def build(mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model and the optimizer of this rank; called again when the number of ranks changes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)  # each rank of the job holds a shard
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def batch_of(step: int) -> torch.Tensor:
    """Return the samples of all ranks in a step."""
    epoch, position = divmod(step, len(labels) // BATCH)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))  # equal in all ranks
    return order[position * BATCH : (position + 1) * BATCH]


def steps() -> int:
    """Return the last step: STEPS, or the number in a file of that name, which may change."""
    told = os.environ.get("STEPS", "300")
    return int(told if told.isdigit() else Path(told).read_text())


job = OneCopy(build)
print(f"{job.replica_id} is ready", flush=True)
while job.step < steps():
    with job.attempt() as (model, optimizer):
        share = job.share(BATCH)
        mine = batch_of(job.step)[share.indices]
        loss = nn.functional.cross_entropy(model(pixels[mine].float()), labels[mine])
        (loss * share.weight).backward()  # averages over all ranks
        if job.commit() and job.step % EVERY == 0:  # steps the optimizer and clears the gradients
            print(f"rank {job.rank} of {job.world_size} step {job.step} loss {loss.item():.3f}", flush=True)
    time.sleep(PAUSE)  # keepstep demo leaves the processors to a process that starts

shard = hashlib.sha256(b"".join(one.to_local().numpy(force=True).tobytes() for one in job.model.parameters()))
print(f"rank {job.rank} of {job.world_size} step {job.step} shard {shard.hexdigest()[:16]}", flush=True)
job.finish()
