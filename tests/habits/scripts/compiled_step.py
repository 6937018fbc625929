"""torch.compile of the function that computes the loss, with the wrapped model in it."""

import torch
from habit import start
from torch import nn

job = start()
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
job.state = {"model": model, "adamw": adamw}
ddp, optimizer = job.ddp(model), job.optimizer(adamw)


@torch.compile(backend="aot_eager")
def loss_of(x, y):
    return nn.functional.mse_loss(ddp(x), y)


while job.current_step() < 10:
    x, y = job.batch()
    optimizer.zero_grad()
    loss = loss_of(x, y)
    loss.backward()
    optimizer.step()
    job.record(loss)
job.finish()
