"""A queue of negatives in a buffer with a pointer, as in MoCo, and a counter in a Python attribute."""

import torch
from habit import start
from torch import nn


class Queue(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(8, 4)
        self.register_buffer("queue", torch.zeros(8, 4))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        out = self.net(x)
        score = out @ self.queue.clone().T
        with torch.no_grad():
            self.queue[self.pointer % 8] = out[0].detach()
            self.pointer += 1
        return out, score


job = start(
    plain={"": "the queue of a process has its own samples"},
    ddp={"": "a step that is repeated moves the queue twice"},
)
model = Queue()
adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
job.state = {"model": model, "adamw": adamw}
ddp, optimizer = job.ddp(model), job.optimizer(adamw)

while job.current_step() < 10:
    x, _ = job.batch()
    optimizer.zero_grad()
    out, score = ddp(x)
    loss = out.square().mean() + score.logsumexp(1).mean()
    loss.backward()
    optimizer.step()
    job.record(loss)
job.finish()
