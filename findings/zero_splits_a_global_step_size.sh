#!/usr/bin/env bash
# Guess: ZeroRedundancyOptimizer divides the state of an optimizer among ranks and leaves its arithmetic as it is.
# Seen: each rank runs the optimizer on its part of the parameters only. Prodigy estimates one step size for the whole
#   model, so each rank has an estimate of its own, here 1.7 times and half of the right one, and each layer is trained
#   with that of the rank that owns it.
# Version: torch 2.13.0, torch.distributed.optim, with prodigyopt 1.1.2.
# Why it matters: the ratio of the learning rates of two layers depends on the number of ranks and on which rank owns
#   them. All replicas are equal, so no comparison of replicas finds it. The consolidated state has one estimate for all
#   parameters, that of rank 0. The cause concerns each optimizer that computes with several parameters at once.
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6 prodigyopt==1.1.2
program_of_ranks 2 <<'PYTHON'
import torch
from finding import compare, of_all_ranks, show_versions
from prodigyopt import Prodigy
from torch.distributed.optim import ZeroRedundancyOptimizer

show_versions("torch", "prodigyopt")


def estimated_step_size(sharded):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    if sharded:
        optimizer = ZeroRedundancyOptimizer(model.parameters(), Prodigy, lr=1.0)
    else:
        optimizer = Prodigy(model.parameters(), lr=1.0)
    for step in range(40):
        torch.manual_seed(step)  # the same batch on both ranks: the mean gradient is that of one process
        inputs = torch.randn(32, 8)
        optimizer.zero_grad()
        (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
    return (optimizer.optim if sharded else optimizer).param_groups[0]["d"]


alone = estimated_step_size(sharded=False)
for words, sharded, known in (("without sharding", False, [1.0, 1.0]), ("with it", True, [1.7, 0.5])):
    compare(
        f"step size of each rank after 40 steps, as a multiple of that of one process; {words}",
        guess=[1.0, 1.0],
        seen=[round(size / alone, 1) for size in of_all_ranks(estimated_step_size(sharded))],
        known=known,
    )
PYTHON
