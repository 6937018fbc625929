"""LBFGS, whose step() runs the model several times in a closure."""

import torch
from habit import start
from torch import nn

job = start(
    plain={"loss": "LBFGS keeps the loss of this process"}, refused="a closure would run the model outside of the step"
)
model = nn.Linear(8, 1)
lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
job.state = {"model": model, "lbfgs": lbfgs}
ddp, optimizer = job.ddp(model), job.optimizer(lbfgs)

while job.current_step() < 6:
    x, y = job.batch()

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x), y)
        loss.backward()
        return loss

    optimizer.step(closure)
    job.record(closure())
job.finish()
