"""bfloat16 autocast, with a model that is partly in bfloat16 itself."""

import torch
from habit import start
from torch import nn

job = start(tolerance=3e-2)  # gradients of the halves are rounded to bfloat16 before they are added
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16).bfloat16(), nn.Linear(16, 1))
adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
job.state = {"model": model, "adamw": adamw}
ddp, optimizer = job.ddp(model), job.optimizer(adamw)

while job.current_step() < 10:
    x, y = job.batch()
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = nn.functional.mse_loss(ddp(x).float(), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    job.record(loss)
job.finish()
