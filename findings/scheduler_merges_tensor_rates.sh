#!/usr/bin/env bash
# Guess: a learning rate may be a number or a tensor, as the documentation of Adam says, and a schedule for two groups
#   of parameters sets two rates in either case.
# Seen: all groups that take the rate of the optimizer have one tensor, and a scheduler writes into it for one group
#   after the other. All groups are trained with the rate of the last one: a layer that is to learn at 1.0 learns at
#   0.1. The scheduler's own list, get_last_lr(), shows the merged rates too. A rate of its own for each group avoids
#   it.
# Version: torch 2.13.0, AdamW(lr=torch.tensor(...)) with LambdaLR and OneCycleLR.
# Why it matters: a tensor is what capturable=True and a compiled step ask for, so that the step is not compiled again
#   for each rate. The model with layer-wise rates then trains with a single one, and no message says so.
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6
program <<'PYTHON'
import torch
from finding import compare, show_versions
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

show_versions("torch")


def distances(rate, schedule, own=False):
    """Return how far ten steps with equal gradients move the weight of each group."""
    weights = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    groups = [{"params": [weight]} | ({"lr": rate.clone()} if own else {}) for weight in weights]
    optimizer = torch.optim.AdamW(groups, lr=rate, weight_decay=0.0)
    scheduler = schedule(optimizer)
    for _ in range(10):
        for weight in weights:
            weight.grad = torch.ones(1)
        optimizer.step()
        scheduler.step()
    return [round(-weight.item(), 2) for weight in weights]


def constant(optimizer):
    return LambdaLR(optimizer, [lambda step: 1.0, lambda step: 0.1])


def cycle(optimizer):
    return OneCycleLR(optimizer, [1.0, 0.1], total_steps=12, cycle_momentum=False)


for schedule in (constant, cycle):
    guess = distances(1.0, schedule)
    for words, seen, known in (
        ("lr=1.0", guess, guess),
        ("lr=torch.tensor(1.0)", distances(torch.tensor(1.0), schedule), [guess[1]] * 2),
        ("a tensor for each group", distances(torch.tensor(1.0), schedule, own=True), guess),
    ):
        compare(f"distance of two groups, schedule {schedule.__name__}, {words}", guess=guess, seen=seen, known=known)
PYTHON
