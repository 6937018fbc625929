"""A penalty on the gradient with respect to the inputs, from autograd.grad with create_graph."""

import torch
from habit import start
from torch import nn

job = start(tolerance=1e-4)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
job.state = {"model": model, "adamw": adamw}
ddp, optimizer = job.ddp(model), job.optimizer(adamw)

while job.current_step() < 10:
    x, y = job.batch()
    x.requires_grad_()
    optimizer.zero_grad()
    out = ddp(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    loss = nn.functional.mse_loss(out, y) + 0.1 * (slope.norm(dim=1) - 1).square().mean()
    loss.backward()
    optimizer.step()
    job.record(loss)
job.finish()
