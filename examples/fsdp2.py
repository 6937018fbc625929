"""Shard a model over the ranks of a group: keepstep run --replicas 2 --nproc-per-replica 2 -- examples/fsdp2.py"""

import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from keepstep import Manager, Optimizer, ProcessGroupGloo
from keepstep.device_mesh import average_over_groups

STEPS = int(os.environ.get("STEPS", "60"))

dist.init_process_group("gloo")  # the ranks of this group; "nccl" on GPUs
rank, ranks = dist.get_rank(), dist.get_world_size()
random = torch.Generator().manual_seed(int(os.environ.get("REPLICA_GROUP_ID", "0")) * ranks + rank)
pixels, labels = map(torch.tensor, load_digits(return_X_y=True))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
mesh = init_device_mesh("cpu", (ranks,))
for layer in (*model, model):
    fully_shard(layer, mesh=mesh)  # averages gradients over the ranks of this group
adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
state = {"model": model, "optimizer": adamw}
manager = Manager(
    pg=ProcessGroupGloo(),  # rank i of this group, and rank i of the others
    state_dict=lambda: {name: part.state_dict() for name, part in state.items()},
    load_state_dict=lambda saved: [part.load_state_dict(saved[name]) for name, part in state.items()],
)
average_over_groups(model, manager)
optimizer = Optimizer(manager, adamw)

while manager.current_step() < STEPS:
    batch = torch.randint(len(labels), (32,), generator=random)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(pixels[batch].float()), labels[batch])
    loss.backward()  # averages over the ranks of the group, then over the groups
    if optimizer.step() and rank == 0 and manager.current_step() % 10 == 0:
        print(f"step {manager.current_step()} groups {manager.num_participants()} loss {loss.item():.3f}", flush=True)

manager.finish()  # wait until all groups have the final weights
manager.shutdown()
dist.destroy_process_group()
