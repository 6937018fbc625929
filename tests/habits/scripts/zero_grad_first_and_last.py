"""The order of torch's tutorial, after a zero_grad() before the loop: the next step begins where the last one ends."""

import torch
from habit import start
from torch import nn

job = start()
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
job.state = {"model": model, "adamw": adamw}
ddp, optimizer = job.ddp(model), job.optimizer(adamw)

optimizer.zero_grad()
while job.current_step() < 10:
    x, y = job.batch()
    loss = nn.functional.mse_loss(ddp(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    job.record(loss)
job.finish()
