"""Two losses with a backward call each: one keeps the graph, the other has a pass of its own."""

import torch
from habit import start
from torch import nn


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.value, self.sign = nn.Linear(8, 16), nn.Linear(16, 1), nn.Linear(16, 1)

    def forward(self, x):
        hidden = self.body(x).tanh()
        return self.value(hidden), self.sign(hidden)


job = start()
model = TwoHeads()
adam = torch.optim.Adam(model.parameters(), lr=1e-2)
job.state = {"model": model, "adam": adam}
# torch's DDP averages only the first backward pass over a graph, so both losses are one pass there
ddp, optimizer = job.ddp(model, find_unused_parameters=True), job.optimizer(adam)

while job.current_step() < 10:
    x, y = job.batch()
    optimizer.zero_grad()
    value, _ = ddp(x)
    first = nn.functional.mse_loss(value, y)
    first.backward()
    _, sign = ddp(x)
    second = nn.functional.binary_cross_entropy_with_logits(sign, (y > 0).float())
    (0.3 * second).backward()
    optimizer.step()
    job.record(first + second)
job.finish()
