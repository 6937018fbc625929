"""Average the parameters every 20 steps: keepstep run --replicas 2 -- examples/train_local_sgd.py"""

import os

import torch
from sklearn.datasets import load_digits
from torch import nn

from keepstep import Manager, ProcessGroupGloo
from keepstep.local_sgd import LocalSGD

STEPS, SYNC_EVERY = int(os.environ.get("STEPS", "30")), 20

pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
random = torch.Generator().manual_seed(int(os.environ.get("REPLICA_GROUP_ID", "0")))  # each group draws its own samples

model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))
adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)
state = {"model": model, "optimizer": adamw}
manager = Manager(
    pg=ProcessGroupGloo(),
    state_dict=lambda: {name: part.state_dict() for name, part in state.items()},
    load_state_dict=lambda saved: [part.load_state_dict(saved[name]) for name, part in state.items()],
)

with LocalSGD(manager, model, adamw, SYNC_EVERY):
    seen = manager.current_step()
    while manager.current_step() < STEPS:  # averages; each follows 20 steps of the optimizer
        batch = torch.randint(len(labels), (32,), generator=random)
        adamw.zero_grad()
        loss = nn.functional.cross_entropy(model(pixels[batch].float()), labels[batch])
        loss.backward()
        adamw.step()  # averages too, at the end of a period
        if manager.current_step() > seen:
            seen = manager.current_step()
            print(f"step {seen} groups {manager.num_participants()} loss {loss.item():.3f}", flush=True)

manager.finish()  # wait until all groups have the final weights
model.eval()
accuracy = (model(pixels.float()).argmax(1) == labels).float().mean()
print(f"step {manager.current_step()} accuracy {accuracy:.3f}", flush=True)
