"""Accumulate, clip, and schedule the learning rate: keepstep run --replicas 2 -- examples/accumulation.py"""

import contextlib
import os

import torch
from sklearn.datasets import load_digits
from torch import nn

from keepstep import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

STEPS, MICRO_BATCHES = 60, 4

pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
random = torch.Generator().manual_seed(int(os.environ.get("REPLICA_GROUP_ID", "0")))  # each group draws its own samples

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
adamw = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.OneCycleLR(adamw, max_lr=1e-2, total_steps=STEPS)
state = {"model": model, "optimizer": adamw, "scheduler": scheduler}
manager = Manager(
    pg=ProcessGroupGloo(),
    state_dict=lambda: {name: part.state_dict() for name, part in state.items()},
    load_state_dict=lambda saved: [part.load_state_dict(saved[name]) for name, part in state.items()],
)
ddp = DistributedDataParallel(manager, model)
optimizer = Optimizer(manager, adamw)

while manager.current_step() < STEPS:
    optimizer.zero_grad()
    for number in range(MICRO_BATCHES):
        last = number == MICRO_BATCHES - 1
        batch = torch.randint(len(labels), (16,), generator=random)
        with contextlib.nullcontext() if last else ddp.no_sync():  # the last backward pass averages over the groups
            loss = nn.functional.cross_entropy(ddp(pixels[batch].float()), labels[batch])
            (loss / MICRO_BATCHES).backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)  # averaged gradients: equal in all groups
    if optimizer.step():
        scheduler.step()  # only if the optimizer stepped

manager.finish()  # wait until all groups have the final weights
print(
    f"step {manager.current_step()} loss {loss.item():.3f} learning rate {scheduler.get_last_lr()[0]:.2g}", flush=True
)
