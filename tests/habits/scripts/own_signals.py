"""A script with handlers of its own: a timer that prints, SIGUSR1 that saves, SIGTERM that sets a flag."""

import os
import signal

import torch
from habit import start
from torch import nn

job = start()
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
job.state = {"model": model, "adamw": adamw}
ddp, optimizer = job.ddp(model), job.optimizer(adamw)

seen = {"timer": 0, "stop": False}
signal.signal(signal.SIGALRM, lambda *_: seen.update(timer=seen["timer"] + 1))
signal.signal(signal.SIGUSR1, lambda *_: torch.save(model.state_dict(), os.devnull))
signal.signal(signal.SIGTERM, lambda *_: seen.update(stop=True))
signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)

while job.current_step() < 10 and not seen["stop"]:
    x, y = job.batch()
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(ddp(x), y)
    os.kill(os.getpid(), signal.SIGUSR1)
    loss.backward()
    optimizer.step()
    job.record(loss)
signal.setitimer(signal.ITIMER_REAL, 0)
job.finish()
