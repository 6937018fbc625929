#!/usr/bin/env bash
# Guess: torch.optim.Adafactor with eps=(None, ...), the default, steps each parameter with the epsilon of its own
#   dtype, as its page defines None. So a float32 parameter is stepped alike alone and beside bfloat16 ones.
# Seen: the first parameter of a group sets the epsilon for all that follow. After a bfloat16 parameter, whose epsilon
#   is 0.0078, a float32 parameter with gradients below that takes steps that are smaller by their quotient; here 78
#   times.
# Version: torch 2.13.0, torch.optim.Adafactor.
# Why it matters: models in bfloat16 keep norms, routers or adapters in float32, and gradients are usually far below
#   0.0078. How fast such layers train depends on the order of model.parameters(). Groups of one dtype are right.
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6
program <<'PYTHON'
import torch
from finding import compare, show_versions

show_versions("torch")
LOW, FULL = torch.bfloat16, torch.float32


def moved(*dtypes):
    """Return how far a step moves the float32 parameter among parameters of these dtypes in one group."""
    parameters = [torch.nn.Parameter(torch.ones(4, 4, dtype=dtype)) for dtype in dtypes]
    for one in parameters:
        one.grad = torch.full_like(one, 1e-4)
    torch.optim.Adafactor(parameters, lr=0.01).step()
    full = parameters[dtypes.index(FULL)]
    return round((1 - full[0, 0]).item(), 6)


for words, dtypes, known in (
    ("alone", [FULL], 0.01),
    ("before a bfloat16 one", [FULL, LOW], 0.01),
    ("after a bfloat16 one", [LOW, FULL], 0.000128),
):
    subject = f"movement of a float32 parameter by one step of 0.01, {words}"
    compare(subject, guess=0.01, seen=moved(*dtypes), known=known)
PYTHON
