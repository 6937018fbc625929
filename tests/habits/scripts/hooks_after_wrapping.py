"""Hooks that change gradients after they are accumulated, registered after the model is wrapped."""

import torch
from habit import start
from torch import nn

job = start()
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
job.state = {"model": model, "sgd": sgd}
ddp, optimizer = job.ddp(model), job.optimizer(sgd)
for one in model.parameters():
    one.register_hook(lambda gradient: gradient.clamp(-0.05, 0.05) if gradient.ndim > 3 else gradient * 2)

while job.current_step() < 10:
    x, y = job.batch()
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(ddp(x), y)
    loss.backward()
    optimizer.step()
    job.record(loss)
job.finish()
