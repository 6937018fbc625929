"""An average of the weights over time, kept by hand in a deep copy of the model."""

import copy

import torch
from habit import start
from torch import nn

job = start()
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
ema = copy.deepcopy(model).requires_grad_(False)
adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
job.state = {"model": model, "ema": ema, "adamw": adamw}
ddp, optimizer = job.ddp(model), job.optimizer(adamw)

while job.current_step() < 10:
    x, y = job.batch()
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(ddp(x), y)
    loss.backward()
    if optimizer.step():
        with torch.no_grad():
            for average, weight in zip(ema.parameters(), model.parameters()):
                average.lerp_(weight, 0.1)
    job.record(loss)
job.finish()
