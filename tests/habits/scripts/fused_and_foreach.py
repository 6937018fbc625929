"""Fused Adam, foreach SGD of a second model, amsgrad, maximize: options of torch's optimizers in one optimizer."""

import torch
from habit import start
from torch import nn

job = start()
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
adam = torch.optim.AdamW(
    [
        {"params": model[0].parameters(), "lr": torch.tensor(1e-2), "amsgrad": True},
        {"params": model[2].parameters(), "lr": torch.tensor(2e-2)},
    ],
    fused=True,
)
job.state = {"model": model, "adam": adam}
ddp, optimizer = job.ddp(model), job.optimizer(adam)

while job.current_step() < 10:
    x, y = job.batch()
    optimizer.zero_grad(set_to_none=False)
    loss = nn.functional.mse_loss(ddp(x), y)
    loss.backward()
    if optimizer.step():
        for group in optimizer.param_groups:
            group["lr"].mul_(0.95)
    job.record(loss)
job.finish()
