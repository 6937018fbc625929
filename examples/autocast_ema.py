"""Train in bfloat16, and average the weights over time: keepstep run --replicas 2 -- examples/autocast_ema.py"""

import os

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from keepstep import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

STEPS = 60

pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
random = torch.Generator().manual_seed(int(os.environ.get("REPLICA_GROUP_ID", "0")))  # each group draws its own samples

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
state = {"model": model, "optimizer": adamw, "ema": ema}
manager = Manager(
    pg=ProcessGroupGloo(),
    state_dict=lambda: {name: part.state_dict() for name, part in state.items()},
    load_state_dict=lambda saved: [part.load_state_dict(saved[name]) for name, part in state.items()],
)
ddp = DistributedDataParallel(manager, model)
optimizer = Optimizer(manager, adamw)

while manager.current_step() < STEPS:
    batch = torch.randint(len(labels), (64,), generator=random)
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):  # "cuda" on a GPU
        loss = nn.functional.cross_entropy(ddp(pixels[batch].float()), labels[batch])
    loss.backward()  # outside of autocast
    if optimizer.step():
        ema.update_parameters(model)  # only if the weights changed

manager.finish()  # wait until all groups have the final weights
accuracy = (ema(pixels.float()).argmax(1) == labels).float().mean()
print(f"step {manager.current_step()} accuracy of the averaged weights {accuracy:.3f}", flush=True)
