"""OneCycleLR, stepped after each step, and a weight decay that the script changes by hand."""

import torch
from habit import start
from torch import nn

job = start()
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
adamw = torch.optim.AdamW(
    [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
)
scheduler = torch.optim.lr_scheduler.OneCycleLR(adamw, max_lr=[1e-2, 2e-2], total_steps=12)
job.state = {"model": model, "adamw": adamw, "scheduler": scheduler}
ddp, optimizer = job.ddp(model), job.optimizer(adamw)

while job.current_step() < 12:
    x, y = job.batch()
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(ddp(x), y)
    loss.backward()
    if optimizer.step():
        scheduler.step()
        optimizer.param_groups[0]["weight_decay"] *= 0.9
    job.record(loss)
job.finish()
