#!/usr/bin/env bash
# Guess: get_optimizer_state_dict only reads. A run that saves its state before the first step trains as one that does
#   not.
# Seen: for an optimizer without state it runs a step with gradients of zero and keeps what the step left: Adam counts
#   one step more, so its first update is 0.74 of the learning rate and not 1.0, and later ones differ too. SGD with
#   dampening starts from a momentum of zero and not from the first gradient.
# Version: torch 2.13.0, torch.distributed.checkpoint.state_dict.
# Why it matters: jobs save at step 0, or read the state to learn its layout before they load. That job has other
#   weights than the same job without it; a group that joins and one that started train differently from the first step.
# keepstep: it sets the count of that step back, for the optimizer of a keepstep.Optimizer or of LocalSGD:
#   tests/services/manager/models/test_torch_state_functions.py
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6
program <<'PYTHON'
import torch
from finding import compare, show_versions
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

show_versions("torch")


def first_update(optimizer_of, read):
    model = torch.nn.Linear(1, 1, bias=False)
    before = model.weight.item()
    optimizer = optimizer_of(model.parameters())
    if read:
        get_optimizer_state_dict(model, optimizer)
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    return round(before - model.weight.item(), 3)


adam = lambda parameters: torch.optim.Adam(parameters, lr=0.1)
momentum = lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5)
compare(
    "first update of Adam with a rate of 0.1: without and with a read before",
    guess=[0.1, 0.1],
    seen=[first_update(adam, False), first_update(adam, True)],
    known=[0.1, 0.074],
)
compare(
    "first update of SGD with a rate of 0.1, momentum and a dampening of 0.5: without and with a read before",
    guess=[0.1, 0.1],
    seen=[first_update(momentum, False), first_update(momentum, True)],
    known=[0.1, 0.05],
)
PYTHON
