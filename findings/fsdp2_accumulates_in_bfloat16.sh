#!/usr/bin/env bash
# Guess: float32 parameters that are sharded with param_dtype=bfloat16 get float32 gradients, and passes are added in
#   float32, with or without communication, as under autocast.
# Seen: passes without communication (set_requires_gradient_sync(False)) are added in bfloat16 if reduce_dtype is not
#   given: 300 passes of a gradient of 1 give 256, where bfloat16 has no next integer. param.grad is float32 at the end.
#   With communication in each pass, or with reduce_dtype=torch.float32, the sum is 300.
# Version: torch 2.13.0, torch.distributed.fsdp.fully_shard with MixedPrecisionPolicy.
# Why it matters: the later a microbatch comes in an accumulation, the less of its gradient is kept: each sum is rounded
#   to 8 bits. Saving communication changes the numbers, and the dtype of the gradients does not tell it.
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6
program_of_ranks 2 <<'PYTHON'
import torch
from finding import compare, show_versions
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

show_versions("torch")


def accumulated(reduce_dtype, communicates):
    model = torch.nn.Linear(1, 1, bias=False)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype))
    for index in range(300):
        model.set_requires_gradient_sync(communicates or index == 299)
        model(torch.ones(1, 1)).sum().backward()
    return model.weight.grad.full_tensor().item(), str(model.weight.grad.dtype)


for reduce_dtype, communicates, known in (
    (None, True, (300.0, "torch.float32")),
    (None, False, (256.0, "torch.float32")),
    (torch.float32, False, (300.0, "torch.float32")),
):
    compare(
        f"sum of 300 gradients of 1; reduce_dtype={reduce_dtype}, communication in "
        f"{'each pass' if communicates else 'the last pass'}",
        guess=(300.0, "torch.float32"),
        seen=accumulated(reduce_dtype, communicates),
        known=known,
    )
PYTHON
