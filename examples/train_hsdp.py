"""HSDP with tensor parallelism: TP=2 keepstep run --replicas 2 --nproc-per-replica 4 -- examples/train_hsdp.py"""

import os
import warnings

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from keepstep import Manager, Optimizer, ProcessGroupGloo
from keepstep.device_mesh import average_over_groups, ft_init_device_mesh

STEPS = int(os.environ.get("STEPS", "60"))
TP = int(os.environ.get("TP", "1"))

dist.init_process_group("gloo")  # the ranks of this group; "nccl" on GPUs
ranks = dist.get_world_size()
pixels, labels = map(torch.tensor, load_digits(return_X_y=True))

state = {}
manager = Manager(
    pg=ProcessGroupGloo(),  # rank i of this group, and rank i of the others
    state_dict=lambda: {name: part.state_dict() for name, part in state.items()},
    load_state_dict=lambda saved: [part.load_state_dict(saved[name]) for name, part in state.items()],
)
mesh = ft_init_device_mesh(
    device_type="cpu",
    mesh_shape=(2, ranks // TP, TP),  # the quorum decides the first one
    mesh_dim_names=("dp_replicate", "dp_shard", "tp"),
    replicate_dim=0,
    manager=manager,
)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
if TP > 1:
    warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)  # of operations in place; here are none
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
for layer in (model[0], model[2], model):
    fully_shard(layer, mesh=mesh["dp_shard"])
average_over_groups(model, manager)
adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
state |= {"model": model, "optimizer": adamw}
optimizer = Optimizer(manager, adamw)

shard = mesh.get_local_rank("dp_shard")  # ranks of one tensor-parallel group read the same batch
random = torch.Generator().manual_seed(int(os.environ.get("REPLICA_GROUP_ID", "0")) * ranks + shard)
while manager.current_step() < STEPS:
    batch = torch.randint(len(labels), (32,), generator=random)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(pixels[batch].float()), labels[batch])
    loss.backward()  # averages over the ranks of the group, then over the groups
    if optimizer.step() and dist.get_rank() == 0 and manager.current_step() % 10 == 0:
        print(f"step {manager.current_step()} groups {manager.num_participants()} loss {loss.item():.3f}", flush=True)

manager.finish()  # wait until all groups have the final weights
manager.shutdown()
dist.destroy_process_group()
