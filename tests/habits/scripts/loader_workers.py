"""Persistent DataLoader workers with seeds of their own, and torch's DistributedSampler with set_epoch."""

import random

import torch
from habit import start
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

job = start(
    plain={"": "the sampler of two processes forms other batches"},
    ddp={"": "a group that comes back begins its epoch again"},
)


class Samples(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return x, x.sum().sin().reshape(1)


def seed_worker(worker):
    random.seed(torch.initial_seed() % 2**32 + worker)


model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
job.state = {"model": model, "adamw": adamw}
ddp, optimizer = job.ddp(model), job.optimizer(adamw)
data = Samples()
sampler = DistributedSampler(data, num_replicas=job.groups, rank=job.group, seed=1)
loader = DataLoader(
    data, batch_size=8, sampler=sampler, num_workers=2, persistent_workers=True, worker_init_fn=seed_worker,
    drop_last=True, prefetch_factor=2,
)  # fmt: skip

epoch = 0
while job.current_step() < 12:
    sampler.set_epoch(epoch)
    for x, y in loader:
        if job.current_step() >= 12:
            break
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x), y)
        loss.backward()
        optimizer.step()
        job.record(loss)
    epoch += 1
job.finish()
