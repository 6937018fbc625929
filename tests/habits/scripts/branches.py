"""Experts that a step uses or not, by the step and by the process, and layers that are dropped at random."""

import torch
from habit import start
from torch import nn


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.deep, self.out = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x, expert, deep):
        x = self.experts[expert](x).tanh()
        return self.out(self.deep(x).tanh() if deep else x)


job = start(plain={"": "the processes use other experts than one process does"})
model = Experts()
adamw = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
job.state = {"model": model, "adamw": adamw}
ddp, optimizer = job.ddp(model, find_unused_parameters=True), job.optimizer(adamw)

while job.current_step() < 10:
    step = job.current_step()
    x, y = job.batch()
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(ddp(x, (step + job.group) % 3 if step % 2 else 0, deep=step % 3 != 1), y)
    loss.backward()
    optimizer.step()
    job.record(loss)
job.finish()
