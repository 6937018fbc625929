"""Resume from the newest file of this process, which the script writes every two steps."""

from pathlib import Path

import torch
from habit import RESULT, start
from torch import nn

job = start()
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(adamw, 3)
job.state = {"model": model, "adamw": adamw, "scheduler": scheduler}
ddp, optimizer = job.ddp(model), job.optimizer(adamw)

path = Path(RESULT) / f"checkpoint-{job.group}.pt"
if path.exists():
    saved = torch.load(path)
    for name, part in job.state.items():
        part.load_state_dict(saved[name])
    job.load_state_of_steps(saved["job"])

while job.current_step() < 10:
    x, y = job.batch()
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(ddp(x), y)
    loss.backward()
    if optimizer.step():
        scheduler.step()
        job.record(loss)
        if job.current_step() % 2 == 0:
            saved = {name: part.state_dict() for name, part in job.state.items()}
            torch.save({**saved, "job": job.state_of_steps()}, path)
job.finish()
