"""Resume from a file that has the weights only: a group that comes back begins with old weights at step 0."""

from pathlib import Path

import torch
from habit import RESULT, start
from torch import nn

job = start()
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
path = Path(RESULT) / f"weights-{job.group}.pt"
if path.exists():
    model.load_state_dict(torch.load(path))
job.state = {"model": model, "adamw": adamw}
ddp, optimizer = job.ddp(model), job.optimizer(adamw)

while job.current_step() < 10:
    x, y = job.batch()
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(ddp(x), y)
    loss.backward()
    optimizer.step()
    job.record(loss)
    torch.save(model.state_dict(), path)
job.finish()
