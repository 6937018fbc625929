"""A notebook: cells that are executed one after another, in a running event loop, some of them twice."""

import asyncio

CELLS = (
    """
import torch
from habit import start
from torch import nn
job = start()
""",
    """
torch.manual_seed(3)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
job.state = {"model": model, "adamw": adamw}
ddp, optimizer = job.ddp(model), job.optimizer(adamw)
""",
    """
def train(until):
    while job.current_step() < until:
        x, y = job.batch()
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(ddp(x), y)
        loss.backward()
        optimizer.step()
        job.record(loss)
""",
    "train(3)",
    "train(7)",
    "train(10)",
    "job.finish()",
)


async def kernel():
    names = {"__name__": "__main__"}
    for number, cell in enumerate(CELLS):
        exec(compile(cell, f"<cell {number}>", "exec"), names)
        await asyncio.sleep(0)


asyncio.run(kernel())
