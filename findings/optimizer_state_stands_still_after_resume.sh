#!/usr/bin/env bash
# Guess: state_dict and load_state_dict of an optimizer that keeps float32 means for bfloat16 weights restore what was
#   saved, and a resumed run trains as one without a break.
# Seen: Optimizer.load_state_dict casts each floating-point tensor of the state to the dtype of its parameter. CAME
#   multiplies its means by 0.999 in place, so from the resume on they are bfloat16, where 0.999 x rounds to x: a mean
#   of squares never falls again. Gradients of a tenth leave it where it was, and bring it to 6 % without a break.
# Version: came-pytorch 0.1.3 with torch 2.13.0. The cast is that of torch and concerns each optimizer that does not
#   undo it.
# Why it matters: each update is divided by the root of that mean. A job that resumes trains on with the scale of the
#   gradients at the resume, for the rest of its time, and no message says so. Put the saved tensors into
#   optimizer.state after the load, or add a hook that does.
# keepstep: a group that heals has the source's values and dtypes:
#   tests/services/manager/agreement/test_exact_heals.py::test_a_group_that_joins_has_the_optimizer_state_of_its_source_in_its_dtype
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6 came-pytorch==0.1.3
program <<'PYTHON'
import copy

import torch
from came_pytorch import CAME
from finding import compare, show_versions

show_versions("came-pytorch", "torch")


def mean_after(dtype, resumed):
    """Return the dtype of the mean of squares, and its ratio to what it was before gradients fell to a tenth."""
    weight = torch.nn.Parameter(torch.zeros(8, 8, dtype=dtype))
    optimizer = CAME([weight], lr=1e-3)

    def train(steps, gradient):
        for _ in range(steps):
            weight.grad = torch.full_like(weight, gradient)
            optimizer.step()
        return optimizer.state[weight]["exp_avg_sq_row"].mean().item()

    before = train(1500, 1.0)
    if resumed:
        state = copy.deepcopy(optimizer.state_dict())
        optimizer = CAME([weight], lr=1e-3)
        optimizer.load_state_dict(state)
    after = train(3000, 0.1)
    return [str(optimizer.state[weight]["exp_avg_sq_row"].dtype), round(after / before, 2)]


for dtype, known in ((torch.float32, ["torch.float32", 0.06]), (torch.bfloat16, ["torch.bfloat16", 1.0])):
    compare(
        f"mean of squares after a resume, and 3,000 steps with gradients of a tenth; weights in {dtype}",
        guess=mean_after(dtype, resumed=False),
        seen=mean_after(dtype, resumed=True),
        known=known,
    )
PYTHON
