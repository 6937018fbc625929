"""A thread that prepares batches ahead, and one that logs the norm of the weights while they change."""

import queue
import threading

import torch
from habit import start
from torch import nn

job = start()
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
job.state = {"model": model, "adamw": adamw}
ddp, optimizer = job.ddp(model), job.optimizer(adamw)
wanted, ready, stop = queue.Queue(), queue.Queue(), threading.Event()


def prepare():
    while (step := wanted.get()) is not None:
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        ready.put((step, job.share(x)))


def log():
    while not stop.wait(0.001):
        with torch.no_grad():
            sum(one.norm() for one in model.parameters()), job.current_step()


threads = [threading.Thread(target=prepare), threading.Thread(target=log)]
for thread in threads:
    thread.start()
wanted.put(job.current_step())
while job.current_step() < 10:
    step, x = ready.get()
    if step != job.current_step():  # a batch that was prepared for another step
        wanted.put(job.current_step())
        continue
    optimizer.zero_grad()
    loss = (ddp(x) - x.sum(1, keepdim=True).sin()).square().mean()
    loss.backward()
    wanted.put(step + 1)  # prepare the next one during the step
    optimizer.step()
    job.record(loss)
stop.set()
wanted.put(None)
for thread in threads:
    thread.join()
job.finish()
