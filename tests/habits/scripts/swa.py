"""Stochastic weight averaging of torch: AveragedModel, SWALR, and update_bn at the end."""

import torch
from habit import start
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

job = start(
    plain={"": "BatchNorm normalizes over the samples of one process"},
    ddp={
        "running_": "DDP keeps the statistics of rank 0, keepstep averages them",
        "num_batches": "a step was repeated",
    },
)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 1))
sgd = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
averaged = AveragedModel(model)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(sgd, T_max=10)
swa = SWALR(sgd, swa_lr=0.02, anneal_epochs=3)
job.state = {"model": model, "sgd": sgd, "averaged": averaged, "scheduler": scheduler, "swa": swa}
ddp, optimizer = job.ddp(model), job.optimizer(sgd)

while job.current_step() < 12:
    x, y = job.batch()
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(ddp(x), y)
    loss.backward()
    if optimizer.step():
        if job.current_step() > 6:
            averaged.update_parameters(model)
            swa.step()
        else:
            scheduler.step()
    job.record(loss)
update_bn([torch.randn(16, 8, generator=torch.Generator().manual_seed(step)) for step in range(3)], averaged)
job.finish()
