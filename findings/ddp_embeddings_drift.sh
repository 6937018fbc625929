#!/usr/bin/env bash
# Guess: replicas under DistributedDataParallel stay equal with every layer of torch without random numbers: they begin
#   equal, and take equal steps.
# Seen: those of nn.Embedding(max_norm=...) do not. Its forward pass shrinks the rows that the batch uses, in the weight
#   itself, and each rank uses others. The optimizer then adds the same step to rows that are longer on one rank. A row
#   that is shrunk later on the other rank has another direction there, so the replicas stay apart.
# Version: torch 2.13.0, nn.Embedding and nn.EmbeddingBag with max_norm.
# Why it matters: rank 0 saves a model that no other rank has, and each rank computes gradients at weights of its own.
#   Nothing compares them. Shrinking all rows after each step keeps the replicas equal.
# keepstep: warns when such a module is wrapped; the groups compare their weights, and name a group that differs
#   (tests/unit/keepstep/script_checks/test_script_checker.py).
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6
program_of_ranks 2 <<'PYTHON'
import torch
import torch.distributed as dist
from finding import compare, of_all_ranks, show_versions
from torch.nn.parallel import DistributedDataParallel

show_versions("torch")


def trained(limit):
    """Return the embedding of each rank after 20 steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Embedding(50, 8, max_norm=limit), torch.nn.Linear(8, 1))
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    words = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(20):
        optimizer.zero_grad()
        (replica(torch.randint(50, (16,), generator=words)) - 1).square().mean().backward()
        optimizer.step()
    return of_all_ranks(model[0].weight.detach())


for limit, known in ((None, 0), (1.0, 47)):
    one, other = trained(limit)
    apart = int((one != other).any(dim=1).sum())
    subject = f"rows of 50 that differ between two ranks after 20 steps, max_norm={limit}"
    compare(subject, guess=0, seen=apart, known=known)
PYTHON
