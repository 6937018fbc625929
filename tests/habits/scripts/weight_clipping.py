"""Weights that the script changes by itself after each step: clipped, and normalized."""

import torch
from habit import start
from torch import nn

job = start()
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
rmsprop = torch.optim.RMSprop(model.parameters(), lr=1e-2)
job.state = {"model": model, "rmsprop": rmsprop}
ddp, optimizer = job.ddp(model), job.optimizer(rmsprop)

while job.current_step() < 10:
    x, y = job.batch()
    optimizer.zero_grad()
    loss = -(ddp(x) * y.sign()).mean()
    loss.backward()
    if optimizer.step():
        with torch.no_grad():
            for one in model.parameters():
                one.clamp_(-0.1, 0.1)
            model[2].weight.data = nn.functional.normalize(model[2].weight.data, dim=1)
    job.record(loss)
job.finish()
