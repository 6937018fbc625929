"""Weight norm and spectral norm as parametrizations, and a pruned layer."""

import torch
from habit import start
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

REPEATED = "each forward pass moves it, also that of a step that is repeated"
job = start(ddp={"": REPEATED}, tolerance=1e-4)
model = nn.Sequential(
    weight_norm(nn.Linear(8, 16)), nn.Tanh(), spectral_norm(nn.Linear(16, 16)), nn.Tanh(),
    orthogonal(nn.Linear(16, 16)), prune.l1_unstructured(nn.Linear(16, 1), "weight", amount=0.3),
)  # fmt: skip
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
