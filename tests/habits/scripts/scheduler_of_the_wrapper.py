"""Schedulers and hooks made from the wrapped optimizer, because that is the one at hand."""

import torch
from habit import start
from torch import nn

job = start()
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
ddp, optimizer = job.ddp(model), job.optimizer(sgd)
wrapped = optimizer if isinstance(optimizer, torch.optim.Optimizer) else sgd
scheduler = torch.optim.lr_scheduler.CyclicLR(wrapped, base_lr=0.01, max_lr=0.1, step_size_up=3)
clipped = []
wrapped.register_step_pre_hook(lambda *_: clipped.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
job.state = {"model": model, "sgd": wrapped, "scheduler": scheduler}

while job.current_step() < 10:
    x, y = job.batch()
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(ddp(x), y)
    loss.backward()
    if optimizer.step():
        scheduler.step()
    job.record(loss)
job.finish()
