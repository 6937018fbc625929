"""Skip the step if the norm of the averaged gradients is too large: zero_grad() follows without a step()."""

import torch
from habit import start
from torch import nn

job = start()
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
job.state = {"model": model, "adamw": adamw}
ddp, optimizer = job.ddp(model), job.optimizer(adamw)

tries = 0
while job.current_step() < 10:
    tries += 1
    x, y = job.batch()
    spike = 100.0 if job.current_step() % 3 == 2 and tries % 2 == 0 else 1.0
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(ddp(x), y)
    (spike * loss).backward()
    if nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 20:
        continue
    optimizer.step()
    job.record(loss)
job.finish()
