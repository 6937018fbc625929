"""Accumulate gradients over one to four micro-batches, more of them as the training goes on."""

import contextlib

import torch
from habit import start
from torch import nn

job = start()
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
job.state = {"model": model, "adamw": adamw}
ddp, optimizer = job.ddp(model), job.optimizer(adamw)

while job.current_step() < 10:
    number = 1 + job.current_step() // 3
    random = torch.Generator().manual_seed(job.current_step())
    optimizer.zero_grad()
    total = 0.0
    for micro in range(number):
        x = job.share(torch.randn(8, 8, generator=random))
        with contextlib.nullcontext() if micro == number - 1 else ddp.no_sync():
            loss = (ddp(x) - x.sum(1, keepdim=True)).square().mean() / number
            loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    job.record(total)
job.finish()
