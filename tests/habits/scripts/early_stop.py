"""Stop when the loss of a validation set has not improved, and go back to the best weights."""

import copy

import torch
from habit import start
from torch import nn

job = start()
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
adam = torch.optim.Adam(model.parameters(), lr=0.1)
best = {"loss": float("inf"), "waited": 0, "weights": copy.deepcopy(model.state_dict())}
job.state = {"model": model, "adam": adam, "best": best}
ddp, optimizer = job.ddp(model), job.optimizer(adam)
validation = torch.randn(64, 8, generator=torch.Generator().manual_seed(7))

while job.current_step() < 30 and best["waited"] < 3:
    x, y = job.batch()
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(ddp(x), y)
    loss.backward()
    if not optimizer.step():
        continue
    job.record(loss)
    model.eval()
    with torch.inference_mode():
        score = nn.functional.mse_loss(model(validation), validation.sum(1, keepdim=True).sin()).item()
    model.train()
    if score < best["loss"]:
        best.update(loss=score, waited=0, weights=copy.deepcopy(model.state_dict()))
    else:
        best["waited"] += 1
job.finish()
