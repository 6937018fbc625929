#!/usr/bin/env bash
# Guess: PeriodicModelAverager.average_parameters makes the parameters that it is given equal on all ranks.
# Seen: it averages only those whose grad is not None at that moment. The others keep the values of each rank, without a
#   word; if none has a gradient, as after zero_grad, it raises a ValueError from torch.cat.
# Version: torch 2.13.0, torch.distributed.algorithms.model_averaging.
# Why it matters: between two averages ranks train apart, also layers that the last step did not use: an expert, a head,
#   a layer that was dropped. Such a layer is not averaged in that round, and the model that is saved has one rank's.
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6
program_of_ranks 2 <<'PYTHON'
import torch
import torch.distributed as dist
from finding import compare, of_all_ranks, show_versions
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

show_versions("torch")
layers = torch.nn.ModuleDict({name: torch.nn.Linear(1, 1, bias=False) for name in ("used", "unused")})
for parameter in layers.parameters():
    torch.nn.init.constant_(parameter, dist.get_rank())  # as after steps of its own
averager = PeriodicModelAverager(period=1)
layers["used"](torch.ones(1, 1)).sum().backward()
averager.average_parameters(layers.parameters())
compare(
    "weights on ranks 0 and 1 after averaging 0 and 1, of a layer that the last step used, and of another",
    guess={"used": [0.5, 0.5], "unused": [0.5, 0.5]},
    seen={name: of_all_ranks(layer.weight.item()) for name, layer in layers.items()},
    known={"used": [0.5, 0.5], "unused": [0.0, 1.0]},
)

layers.zero_grad()
try:
    averager.average_parameters(layers.parameters())
    outcome = of_all_ranks(layers["unused"].weight.item())
except ValueError as error:
    outcome = type(error).__name__
compare("the same after zero_grad, for the other layer", guess=[0.5, 0.5], seen=outcome, known="ValueError")
PYTHON
