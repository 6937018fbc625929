"""A notebook whose cell with model and optimizer is executed again before the training, with other sizes."""

import torch
from habit import start
from torch import nn

job = start(warns=("model not in the registered state",))  # of the models that were replaced
for width in (4, 32, 16):  # the user tries sizes
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 1))
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job.state = {"model": model, "adamw": adamw}
    ddp, optimizer = job.ddp(model), job.optimizer(adamw)

while job.current_step() < 10:
    x, y = job.batch()
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(ddp(x), y)
    loss.backward()
    optimizer.step()
    job.record(loss)
job.finish()
