"""ReduceLROnPlateau by the loss of this process, as many scripts do. Then the learning rates of the groups differ."""

import torch
from habit import start
from torch import nn

job = start(
    plain={"": "the learning rates of the processes differ"},
    refused="compute learning rates and the like from manager.current_step()",
)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
adam = torch.optim.Adam(model.parameters(), lr=5e-2)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(adam, factor=0.5, patience=0)
job.state = {"model": model, "adam": adam, "scheduler": scheduler}
ddp, optimizer = job.ddp(model), job.optimizer(adam)

while job.current_step() < 12:
    x, y = job.batch()
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(ddp(x), y)
    loss.backward()
    if optimizer.step():
        scheduler.step(loss.item())
    job.record(loss)
job.finish()
