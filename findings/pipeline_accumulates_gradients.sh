#!/usr/bin/env bash
# Guess: two calls of a pipeline schedule's step accumulate gradients as two calls of backward do.
# Seen: each call divides the whole gradient by the number of microbatches, also the part that earlier calls left and
#   divided already. With 4 microbatches two calls give 1.25 and not 2 times the gradient of one call, three give 1.31
#   and not 3: the weight of an earlier call falls to a quarter with each later one.
# Version: torch 2.13.0, torch.distributed.pipelining, ScheduleGPipe and Schedule1F1B, with scale_grads=True (default).
# Why it matters: gradient accumulation around a pipeline trains almost only on the last call, without an error.
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6
program_of_ranks 2 <<'PYTHON'
import torch
import torch.distributed as dist
from finding import compare, show_versions
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

show_versions("torch")
rank = dist.get_rank()


def gradient(schedule_type, calls):
    torch.manual_seed(0)
    layers = torch.nn.ModuleList([torch.nn.Linear(3, 3), torch.nn.Linear(3, 1)])
    inputs, targets = torch.randn(8, 3), torch.randn(8, 1)
    stage = PipelineStage(layers[rank], rank, 2, torch.device("cpu"))
    schedule = schedule_type(stage, 4, loss_fn=torch.nn.functional.mse_loss)
    for _ in range(calls):
        schedule.step(inputs) if rank == 0 else schedule.step(target=targets)
    return layers[rank].weight.grad


for schedule_type in (ScheduleGPipe, Schedule1F1B):
    once = gradient(schedule_type, 1)
    compare(
        f"{schedule_type.__name__}: gradient of 1, 2 and 3 calls on the same data, as a multiple of that of one call",
        guess=[1.0, 2.0, 3.0],
        seen=[round((gradient(schedule_type, calls) / once).mean().item(), 4) for calls in (1, 2, 3)],
        known=[1.0, 1.25, 1.3125],
    )
PYTHON
