"""Accumulate gradients and forget no_sync(): each backward pass is averaged."""

import torch
from habit import start
from torch import nn

job = start()
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
job.state = {"model": model, "adamw": adamw}
ddp, optimizer = job.ddp(model), job.optimizer(adamw)

while job.current_step() < 10:
    random = torch.Generator().manual_seed(job.current_step())
    optimizer.zero_grad()
    for _ in range(3):
        x = job.share(torch.randn(8, 8, generator=random))
        loss = (ddp(x) - x.sum(1, keepdim=True)).square().mean() / 3
        loss.backward()
    optimizer.step()
    job.record(loss)
job.finish()
