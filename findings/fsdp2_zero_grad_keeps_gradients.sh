#!/usr/bin/env bash
# Guess: zero_grad drops the gradients of all passes since the last step, also those of passes without communication
#   (set_requires_gradient_sync(False)).
# Seen: it does not. Such passes leave their gradients inside FSDP, param.grad is None until then, and zero_grad of the
#   module and of the optimizer finds nothing. The next pass with communication adds the old gradients.
# Version: torch 2.13.0, torch.distributed.fsdp.fully_shard.
# Why it matters: a loop that gives up an accumulation (a loss that is not finite, an error in the data, a step that is
#   tried again) and begins again trains on the gradients that it gave up.
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6
program_of_ranks 2 <<'PYTHON'
import torch
from finding import compare, show_versions
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import init_device_mesh

show_versions("torch")
model = torch.nn.Linear(1, 1, bias=False)
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

model.set_requires_gradient_sync(False)
model(torch.full((1, 1), 100.0)).sum().backward()
visible = model.weight.grad
optimizer.zero_grad()
model.zero_grad()
model.set_requires_gradient_sync(True)
model(torch.ones(1, 1)).sum().backward()
compare(
    "gradients: param.grad after a pass of 100 without communication; after zero_grad and a pass of 1 with it",
    guess=[100.0, 1.0],
    seen=[visible, model.weight.grad.full_tensor().item()],
    known=[None, 101.0],
)
PYTHON
