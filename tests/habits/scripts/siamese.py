"""A siamese net: the wrapped model runs three times before one backward pass."""

import torch
from habit import start
from torch import nn

job = start()
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
job.state = {"model": model, "sgd": sgd}
ddp, optimizer = job.ddp(model), job.optimizer(sgd)

while job.current_step() < 10:
    x, _ = job.batch()
    optimizer.zero_grad()
    anchor, positive, negative = ddp(x), ddp(x + 0.1), ddp(x.flip(1))
    loss = nn.functional.triplet_margin_loss(anchor, positive, negative)
    loss.backward()
    optimizer.step()
    job.record(loss)
job.finish()
