"""scheduler.step() after each iteration, as in every tutorial: a discarded step advances the schedule too."""

import torch
from habit import start
from torch import nn

job = start(
    ddp={"": "the schedule is one step ahead after the step that is discarded"},
    warns=("optimizer changed after a discarded step",),
)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(adamw, T_max=20)
job.state = {"model": model, "adamw": adamw, "scheduler": scheduler}
ddp, optimizer = job.ddp(model), job.optimizer(adamw)

while job.current_step() < 10:
    x, y = job.batch()
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(ddp(x), y)
    loss.backward()
    optimizer.step()
    scheduler.step()
    job.record(loss)
job.finish()
