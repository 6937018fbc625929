"""Schedules by epoch: a warm-up, then cosine annealing with warm restarts, joined by SequentialLR."""

import torch
from habit import start
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LinearLR, SequentialLR

job = start()
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler = SequentialLR(
    sgd, [LinearLR(sgd, 0.1, total_iters=2), CosineAnnealingWarmRestarts(sgd, T_0=2, T_mult=2)], milestones=[2]
)
job.state = {"model": model, "sgd": sgd, "scheduler": scheduler}
ddp, optimizer = job.ddp(model), job.optimizer(sgd)

while job.current_step() < 15:
    x, y = job.batch()
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(ddp(x), y)
    loss.backward()
    if optimizer.step() and job.current_step() % 3 == 0:  # an epoch has three steps
        scheduler.step()
    job.record(loss)
job.finish()
