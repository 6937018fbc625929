"""A loop in a progress bar over a range of steps, which a restarted group begins again."""

import sys

import torch
from habit import start
from torch import nn


class Bar:
    def __init__(self, iterable):
        self.iterable, self.text = iterable, ""

    def __iter__(self):
        for number, one in enumerate(self.iterable):
            sys.stderr.write(f"\r{number} {self.text}")
            yield one

    def set_postfix(self, **values):
        self.text = str(values)


job = start()
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
job.state = {"model": model, "adamw": adamw}
ddp, optimizer = job.ddp(model), job.optimizer(adamw)

for _ in (bar := Bar(range(40))):
    if job.current_step() >= 10:
        break
    x, y = job.batch()
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(ddp(x), y)
    loss.backward()
    optimizer.step()
    bar.set_postfix(loss=loss.item())
    job.record(loss)
job.finish()
