"""An IterableDataset that shards itself over processes and workers, and ends unevenly."""

import itertools

import torch
from habit import start
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

job = start(
    plain={"": "the stream of two processes forms other batches"},
    ddp={"": "a group that comes back begins its stream again"},
)


class Stream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        place, places = job.group * info.num_workers + info.id, job.groups * info.num_workers
        for number in range(place, 50, places):
            x = torch.randn(8, generator=torch.Generator().manual_seed(number))
            yield x, x.sum().sin().reshape(1)


model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
job.state = {"model": model, "adamw": adamw}
ddp, optimizer = job.ddp(model), job.optimizer(adamw)
loader = DataLoader(Stream(), batch_size=4, num_workers=2)

for x, y in itertools.chain.from_iterable(itertools.repeat(loader)):
    if job.current_step() >= 12:
        break
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(ddp(x), y)
    loss.backward()
    optimizer.step()
    job.record(loss)
job.finish()
