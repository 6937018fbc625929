"""Activation checkpoints of both kinds, one layer in two of them."""

import torch
from habit import start
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))
        self.last = nn.Linear(16, 1)

    def forward(self, x):
        hidden = self.first(x)
        hidden = checkpoint_sequential(self.blocks, 2, hidden, use_reentrant=False)
        hidden = checkpoint(self.blocks[0], hidden, use_reentrant=False)
        return self.last(hidden)


job = start()
model = Deep()
adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
job.state = {"model": model, "adamw": adamw}
ddp, optimizer = job.ddp(model), job.optimizer(adamw)

while job.current_step() < 10:
    x, y = job.batch()
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(ddp(x), y)
    loss.backward()
    optimizer.step()
    job.record(loss)
job.finish()
