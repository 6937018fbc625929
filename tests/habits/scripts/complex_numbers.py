"""Complex weights beside float64 ones: a layer in the frequency domain."""

import torch
from habit import start
from torch import nn


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex128) / 3)
        self.out = nn.Linear(8, 1, dtype=torch.float64)

    def forward(self, x):
        return self.out(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=8))


job = start()
model = Spectral()
adam = torch.optim.Adam(model.parameters(), lr=1e-2)
job.state = {"model": model, "adam": adam}
ddp, optimizer = job.ddp(model), job.optimizer(adam)

while job.current_step() < 10:
    x, y = job.batch()
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(ddp(x.double()), y.double())
    loss.backward()
    optimizer.step()
    job.record(loss)
job.finish()
