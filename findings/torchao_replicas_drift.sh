#!/usr/bin/env bash
# Guess: replicas under DistributedDataParallel stay equal with each optimizer that is a function of gradient and state.
# Seen: torchao's optimizers with bf16_stochastic_round=True round with the random generator of the process. Replicas
#   whose generators differ, as with a seed for each rank, have different weights after one step. Nothing compares them.
# Version: torchao 0.18.0 with torch 2.13.0.
# Why it matters: scripts add the rank to the seed so that dropout and augmentation differ. The replicas then drift, the
#   saved weights are those of rank 0 alone, and gradients are averages over different models.
# keepstep: groups whose registered weights differ are found by their digests:
#   tests/services/cli/orders/test_verify_replicas.py::test_verify_replicas_names_the_group_that_differs_and_exits_with_1
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6 torchao==0.18.0
export TORCHDYNAMO_DISABLE=1 # the step without a C++ compiler; it rounds in the same way compiled
program_of_ranks 2 <<'PYTHON'
import logging

logging.disable()

import torch
import torch.distributed as dist
from finding import compare, of_all_ranks, show_versions
from torchao.optim import _AdamW

show_versions("torchao", "torch")


def equal_after_three_steps(stochastic, seed):
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(32, 32).bfloat16())
    optimizer = _AdamW(model.parameters(), lr=1e-4, bf16_stochastic_round=stochastic)
    torch.manual_seed(seed)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(4, 32, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
    weights = of_all_ranks(model.module.weight.detach().float().tolist())
    return weights[0] == weights[1]


for stochastic, seed, words, known in (
    (False, dist.get_rank(), "rounding to nearest, seed = rank", True),
    (True, 0, "stochastic rounding, one seed", True),
    (True, dist.get_rank(), "stochastic rounding, seed = rank", False),
):
    seen = equal_after_three_steps(stochastic, seed)
    compare(f"whether two replicas are equal after three steps; {words}", guess=True, seen=seen, known=known)
PYTHON
