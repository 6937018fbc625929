"""Fine-tune: only the head trains at first, then one layer more every three steps."""

import torch
from habit import start
from torch import nn

job = start()
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
model[0].requires_grad_(False)
model[2].requires_grad_(False)
adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
job.state = {"model": model, "adamw": adamw}
ddp, optimizer = job.ddp(model, find_unused_parameters=True), job.optimizer(adamw)

while job.current_step() < 10:
    step = job.current_step()
    if step >= 3 and not model[2].weight.requires_grad:
        model[2].requires_grad_(True)
        ddp = ddp if hasattr(ddp, "_keepstep_manager") else job.ddp(model)  # torch's DDP must be made again
    if step >= 6 and not model[0].weight.requires_grad:
        model[0].requires_grad_(True)
        ddp = ddp if hasattr(ddp, "_keepstep_manager") else job.ddp(model)
    x, y = job.batch()
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(ddp(x), y)
    loss.backward()
    optimizer.step()
    job.record(loss)
job.finish()
