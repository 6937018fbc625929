#!/usr/bin/env bash
# Guess: a stage of a pipeline runs its module once for each microbatch, so batch norm counts as many batches.
# Seen: the first step runs each stage once more, forward and backward, to learn the shapes; so does the first step after
#   an evaluation. Each stage but the first does so on torch.empty, whatever was in that memory. Batch norm counts that
#   batch: 5 batches after a step of 4 microbatches, and 14 after three steps with an evaluation before the third. torch
#   restores the random state and removes the gradients of this pass, but not buffers.
# Version: torch 2.13.0, torch.distributed.pipelining, PipelineStage without input_args and output_args, Schedule1F1B.
# Why it matters: running statistics, counters of tokens per expert, and metrics in the loss function include numbers of
#   no sample, again after each evaluation. input_args and output_args together avoid it.
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6
program_of_ranks 2 <<'PYTHON'
import torch
import torch.distributed as dist
from finding import compare, of_all_ranks, show_versions
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

show_versions("torch")
rank = dist.get_rank()
inputs, targets = torch.randn(8, 3), torch.randn(8, 3)


def batches(known_shapes):
    norm = torch.nn.BatchNorm1d(3)
    layers = torch.nn.Sequential(torch.nn.Linear(3, 3), norm)
    shape = torch.zeros(2, 3)
    shapes = {"input_args": shape, "output_args": torch.zeros(2, 3, requires_grad=True)} if known_shapes else {}
    if known_shapes and rank == 1:
        shapes["input_args"] = torch.zeros(2, 3, requires_grad=True)
    schedule = Schedule1F1B(PipelineStage(layers, rank, 2, torch.device("cpu"), **shapes), 4, torch.nn.functional.mse_loss)

    def call(of_schedule):
        of_schedule(inputs) if rank == 0 else of_schedule(target=targets)
        return norm.num_batches_tracked.item()

    counts = [call(schedule.step), call(schedule.step)]
    layers.eval()
    call(schedule.eval)
    layers.train()
    return of_all_ranks([*counts, call(schedule.step)])


for known_shapes, known in ((False, [5, 9, 14]), (True, [4, 8, 12])):
    compare(
        "batches that batch norm counted on ranks 0 and 1, after a step of 4 microbatches, another one, and a third one "
        f"after an evaluation; {'with' if known_shapes else 'without'} input_args and output_args",
        guess=[[4, 8, 12]] * 2,
        seen=batches(known_shapes),
        known=[known] * 2,
    )
PYTHON
