#!/usr/bin/env bash
# Guess: fully_shard on a mesh that replicates and shards makes the replicas equal, as DistributedDataParallel does when
#   it wraps a model: both then only average gradients.
# Seen: nothing is sent when the model is wrapped. Each rank keeps its part of the model that it built itself, so models
#   that were built from different seeds stay different by the same amount for the whole training.
# Version: torch 2.13.0, torch.distributed.fsdp.fully_shard with a mesh of two dimensions.
# Why it matters: scripts add the rank to the seed, for dropout and augmentation, and that was right with
#   DistributedDataParallel. Now the gradient is a mean over different models, and a checkpoint holds one of them. On a
#   mesh that only shards, the model is put together from parts of several initializations.
# keepstep: groups that start together begin with the weights of one of them:
#   tests/services/manager/local_sgd/test_groups.py::test_groups_that_start_together_begin_with_equal_weights
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6
program_of_ranks 2 <<'PYTHON'
import torch
import torch.distributed as dist
from finding import compare, of_all_ranks, show_versions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

show_versions("torch")
mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))


def difference_after_steps(wrap):
    """Return how far the weights of the two replicas are apart, before and after 20 steps."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.manual_seed(dist.get_rank())
    torch.nn.init.normal_(model.weight)
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    apart = []
    for step in range(21):
        weight = model.weight
        weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        values = of_all_ranks(weight.item())
        if step in (0, 20):
            apart.append(round(abs(values[0] - values[1]), 2))
        optimizer.zero_grad()
        (wrapped(torch.ones(1, 1)) - 3).square().sum().backward()
        optimizer.step()
    return apart


for name, wrap, known in (
    ("DistributedDataParallel", DistributedDataParallel, [0.0, 0.0]),
    ("fully_shard", lambda model: fully_shard(model, mesh=mesh), [0.88, 0.88]),
):
    compare(
        f"difference of the weight of two replicas with seed = rank, before and after 20 steps; {name}",
        guess=[0.0, 0.0],
        seen=difference_after_steps(wrap),
        known=known,
    )
PYTHON
