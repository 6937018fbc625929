"""Change from Adam to SGD in the middle, with a new wrapped optimizer."""

import torch
from habit import start
from torch import nn

job = start(kill_at=6)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
adam = torch.optim.Adam(model.parameters(), lr=1e-2)
sgd = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
job.state = {"model": model, "adam": adam, "sgd": sgd}
ddp, optimizer = job.ddp(model), job.optimizer(adam)

while job.current_step() < 16:
    if job.current_step() >= 5 and optimizer.optim is adam:
        optimizer = job.optimizer(sgd)
    x, y = job.batch()
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(ddp(x), y)
    loss.backward()
    optimizer.step()
    job.record(loss)
job.finish()
