"""Muon of torch for the matrices, Adafactor for the rest, stepped together."""

import torch
from habit import start
from torch import nn

job = start(tolerance=1e-3)  # Muon orthogonalizes in bfloat16, which amplifies the last bits of a sum
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
muon = torch.optim.Muon([one for one in model.parameters() if one.ndim == 2], lr=1e-2)
adafactor = torch.optim.Adafactor([one for one in model.parameters() if one.ndim < 2], lr=1e-2)
job.state = {"model": model, "muon": muon, "adafactor": adafactor}
ddp, optimizer_m, optimizer_a = job.ddp(model), job.optimizer(muon), job.optimizer(adafactor)

while job.current_step() < 10:
    x, y = job.batch()
    optimizer_m.zero_grad()
    optimizer_a.zero_grad()
    loss = nn.functional.mse_loss(ddp(x), y)
    loss.backward()
    with job.committing() as committed:
        if committed:
            muon.step()
            adafactor.step()
    job.record(loss)
job.finish()
