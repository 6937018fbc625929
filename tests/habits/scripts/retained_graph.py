"""Two backward calls over one graph. torch's DDP averages the first one only, so it is not the reference here."""

import torch
from habit import start
from torch import nn

job = start(
    plain={"": "torch's DDP averages the first of two passes over a graph only"},
    ddp={"": "torch's DDP averages the first of two passes over a graph only"},
)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))
adam = torch.optim.Adam(model.parameters(), lr=1e-2)
job.state = {"model": model, "adam": adam}
ddp, optimizer = job.ddp(model), job.optimizer(adam)

while job.current_step() < 10:
    x, y = job.batch()
    optimizer.zero_grad()
    out = ddp(x)
    first = nn.functional.mse_loss(out[:, :1], y)
    second = out[:, 1:].square().mean()
    first.backward(retain_graph=True)
    second.backward()
    optimizer.step()
    job.record(first)
job.finish()
