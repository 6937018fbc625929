"""Distillation from a frozen teacher, with a learned temperature that is a parameter beside the model."""

import torch
from habit import start
from torch import nn


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
        self.log_temperature = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return self.net(x) / self.log_temperature.exp()


job = start()
torch.manual_seed(1)
teacher = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).eval().requires_grad_(False)
student = Student()
adamw = torch.optim.AdamW(student.parameters(), lr=1e-2)
job.state = {"student": student, "adamw": adamw}
ddp, optimizer = job.ddp(student), job.optimizer(adamw)

while job.current_step() < 10:
    x, _ = job.batch()
    with torch.no_grad():
        target = teacher(x).softmax(1)
    optimizer.zero_grad()
    loss = nn.functional.kl_div(ddp(x).log_softmax(1), target, reduction="batchmean")
    loss.backward()
    optimizer.step()
    job.record(loss)
job.finish()
