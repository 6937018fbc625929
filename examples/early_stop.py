"""Evaluate together, average a metric, stop together: keepstep run --replicas 2 -- examples/early_stop.py"""

import os

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed import ReduceOp

from keepstep import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

STEPS, EVALUATE_EVERY, PATIENCE = 2000, 10, 3
group, groups = int(os.environ.get("REPLICA_GROUP_ID", "0")), int(os.environ.get("NUM_REPLICA_GROUPS", "1"))

pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
pixels, random = pixels.float(), torch.Generator().manual_seed(group)
test = torch.arange(1500, len(labels))[group::groups]  # each group evaluates a part

model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
best = {"loss": float("inf"), "evaluations_since": 0}  # registered: a group that heals decides as the others do
manager = Manager(pg=ProcessGroupGloo())
manager.register_state_dict_fn("model", model.load_state_dict, model.state_dict)
manager.register_state_dict_fn("optimizer", adamw.load_state_dict, adamw.state_dict)
manager.register_state_dict_fn("best", best.update, best.copy)
ddp = DistributedDataParallel(manager, model)
optimizer = Optimizer(manager, adamw)


def evaluate() -> torch.Tensor:
    """Return the sum of this group's test losses, and their number."""
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(pixels[test]), labels[test], reduction="sum")
    return torch.tensor([loss.item(), len(test)])


while manager.current_step() < STEPS and best["evaluations_since"] < PATIENCE:
    step = manager.current_step()
    metric = evaluate() if step and step % EVALUATE_EVERY == 0 else torch.zeros(2)  # before zero_grad()
    batch = torch.randint(1500, (64,), generator=random)
    optimizer.zero_grad()
    nn.functional.cross_entropy(ddp(pixels[batch]), labels[batch]).backward()
    manager.allreduce(metric, reduce_op=ReduceOp.SUM)  # in every step, so that a group that heals does the same
    if optimizer.step() and metric[1] > 0:  # equal in all groups
        loss = (metric[0] / metric[1]).item()
        best["evaluations_since"] += 1
        if loss < best["loss"]:
            best.update(loss=loss, evaluations_since=0)

manager.finish()  # wait until all groups have the final weights
if manager.participating_rank() == 0:  # one group reports
    print(f"stopped after step {manager.current_step()}, best loss {best['loss']:.3f}", flush=True)
