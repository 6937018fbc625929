"""A GradScaler on the CPU, whose first scale overflows float16 gradients, so that it skips steps."""

import torch
from habit import start
from torch import nn

job = start(
    plain={"": "half of a batch overflows at another scale"},
    ddp={"": "a step that overflows counts in keepstep, and has a batch of its own"},
)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=3)
job.state = {"model": model, "adamw": adamw, "scaler": scaler}
ddp, optimizer = job.ddp(model), job.optimizer(adamw)

for _ in range(100):
    if job.current_step() >= 10:
        break
    x, y = job.batch()
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.float16):
        loss = nn.functional.mse_loss(ddp(x), y)
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    job.record(loss)
job.finish()
