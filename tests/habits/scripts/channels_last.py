"""A convolution net in channels_last, with BatchNorm."""

import torch
from habit import start
from torch import nn

job = start(
    plain={"": "BatchNorm normalizes over the samples of one process"},
    ddp={
        "running_": "DDP keeps the statistics of rank 0, keepstep averages them",
        "num_batches": "a step was repeated",
    },
)
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2), nn.ReLU(),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4),
).to(memory_format=torch.channels_last)  # fmt: skip
sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
job.state = {"model": model, "sgd": sgd}
ddp, optimizer = job.ddp(model), job.optimizer(sgd)

while job.current_step() < 10:
    random = torch.Generator().manual_seed(job.current_step())
    images = job.share(torch.randn(16, 3, 12, 12, generator=random)).to(memory_format=torch.channels_last)
    labels = job.share(torch.randint(4, (16,), generator=random))
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(ddp(images), labels)
    loss.backward()
    optimizer.step()
    job.record(loss)
job.finish()
