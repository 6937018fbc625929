"""The order of torch's tutorial: forward, backward, step, and zero_grad at the end of the iteration."""

import torch
from habit import start
from torch import nn

job = start(refused="no step has begun: call start_quorum() first (Optimizer.zero_grad() does)")
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
job.state = {"model": model, "adamw": adamw}
ddp, optimizer = job.ddp(model), job.optimizer(adamw)

while job.current_step() < 10:
    x, y = job.batch()
    loss = nn.functional.mse_loss(ddp(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    job.record(loss)
job.finish()
