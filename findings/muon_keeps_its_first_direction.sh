#!/usr/bin/env bash
# Guess: torch.optim.Muon with nesterov=False keeps a running mean of the gradients, in any dtype of the parameters.
# Seen: for bfloat16 parameters it divides the mean by its norm in each step, because the orthogonalization writes into
#   the buffer of the momentum: Tensor.bfloat16() of a bfloat16 tensor is no copy. From then on the mean has norm 1, and
#   a gradient of norm g counts 0.05 g against 0.95: the direction of the first gradients stays for about 20 / g steps,
#   and does not turn at all if the gradient reverses and its norm is below 19. With float32 parameters, or with
#   nesterov=True, which makes a copy, the mean is right.
# Version: torch 2.13.0, torch.optim.Muon.
# Why it matters: gradients of a matrix have a norm far below 1, so a training in bfloat16 follows its first batch. The
#   loss falls at first, as the updates have their usual size.
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6
program <<'PYTHON'
import torch
from finding import compare, show_versions

show_versions("torch")


def trained(dtype, nesterov):
    """Return the norm of the momentum after 10 equal steps, and how many reversed ones turn the update."""
    weight = torch.nn.Parameter(torch.zeros(2, 2, dtype=dtype))
    optimizer = torch.optim.Muon([weight], lr=0.01, momentum=0.95, nesterov=nesterov, weight_decay=0.0)

    def step(gradient):
        weight.data.zero_()
        weight.grad = gradient * torch.eye(2, dtype=dtype)
        optimizer.step()
        return weight[0, 0].item()

    for _ in range(10):
        step(0.1)
    norm = optimizer.state[weight]["momentum_buffer"].norm().item()
    turned = next((number for number in range(1, 201) if step(-0.1) > 0), "none of 200")
    return {"norm": round(norm, 2), "steps": turned}


right = {"norm": 0.06, "steps": 7}  # 0.14 (1 - 0.95 ** 10), and 0.95 ** n (2 - 0.95 ** 10) < 1
ahead = {"norm": 0.06, "steps": 6}  # a step of the momentum ahead
for dtype, nesterov, guess, known in (
    (torch.float32, False, right, right),
    (torch.float32, True, ahead, ahead),
    (torch.bfloat16, True, ahead, ahead),
    (torch.bfloat16, False, right, {"norm": 1.0, "steps": "none of 200"}),
):
    subject = "norm of the momentum, and steps until a reversed gradient turns the update"
    compare(f"{subject}; {dtype}, nesterov={nesterov}", guess=guess, seen=trained(dtype, nesterov), known=known)
PYTHON
