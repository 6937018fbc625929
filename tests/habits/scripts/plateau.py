"""ReduceLROnPlateau by a loss that is averaged over the processes."""

import torch
from habit import start
from torch import nn

job = start()
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
adam = torch.optim.Adam(model.parameters(), lr=5e-2)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(adam, factor=0.5, patience=1)
job.state = {"model": model, "adam": adam, "scheduler": scheduler}
ddp, optimizer = job.ddp(model), job.optimizer(adam)

while job.current_step() < 12:
    x, y = job.batch()
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(ddp(x), y)
    loss.backward()
    mean = loss.detach().clone()
    job.average(mean)
    if optimizer.step():
        scheduler.step(mean.item())
    job.record(loss)
job.finish()
