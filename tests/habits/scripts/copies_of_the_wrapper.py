"""A deep copy of the wrapped model, as an average of the weights: AveragedModel(ddp), as torch's documents show."""

import torch
from habit import start
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

job = start(refused="copy or save the module inside it (ddp.module)")
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
ddp, optimizer = job.ddp(model), job.optimizer(adamw)
ema = AveragedModel(ddp, multi_avg_fn=get_ema_multi_avg_fn(0.9))
job.state = {"model": model, "adamw": adamw, "ema": ema}

while job.current_step() < 10:
    x, y = job.batch()
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(ddp(x), y)
    loss.backward()
    if optimizer.step():
        ema.update_parameters(ddp)
    job.record(loss)
job.finish()
