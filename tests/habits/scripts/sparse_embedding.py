"""A recommender: a sparse embedding under SparseAdam, dense layers under Adam."""

import torch
from habit import start
from torch import nn


class Recommender(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(50, 8, sparse=True)
        self.score = nn.Linear(8, 1)

    def forward(self, rows):
        return self.score(self.items(rows).mean(1))


job = start()
model = Recommender()
sparse = torch.optim.SparseAdam(model.items.parameters(), lr=1e-2)
dense = torch.optim.Adam(model.score.parameters(), lr=1e-2)
job.state = {"model": model, "sparse": sparse, "dense": dense}
ddp = job.ddp(model)
optimizer_s, optimizer_d = job.optimizer(sparse), job.optimizer(dense)

while job.current_step() < 10:
    rows = job.share(torch.randint(50, (16, 3), generator=torch.Generator().manual_seed(job.current_step())))
    optimizer_s.zero_grad()
    optimizer_d.zero_grad()
    loss = nn.functional.mse_loss(ddp(rows), rows.float().mean(1, keepdim=True) / 50)
    loss.backward()
    with job.committing() as committed:
        if committed:
            sparse.step()
            dense.step()
    job.record(loss)
job.finish()
