"""An optimizer for each parameter, which steps in a hook during the backward pass to save the memory of gradients."""

import torch
from habit import start
from torch import nn

job = start(refused="was called before the step has committed", plain={"": "each process steps with its own gradients"})
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
optimizers = {one: torch.optim.AdamW([one], lr=1e-2) for one in model.parameters()}
wrapped = {one: job.optimizer(inner) for one, inner in optimizers.items()}


def step_now(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


job.state = {"model": model, **{f"adamw {n}": one for n, one in enumerate(optimizers.values())}}
ddp = job.ddp(model)
for one in model.parameters():
    one.register_post_accumulate_grad_hook(step_now)

for _ in range(10):
    x, y = job.batch()
    job.start_quorum()
    loss = nn.functional.mse_loss(ddp(x), y)
    loss.backward()
    with job.committing():
        pass
    job.record(loss)
job.finish()
