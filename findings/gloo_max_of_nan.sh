#!/usr/bin/env bash
# Guess: an all-reduce with MAX or MIN hands on a NaN, as torch.max and torch.min do.
# Seen: of three ranks, the NaN of one is kept in the first third of the tensor, that of another in the second third,
#   and that of the last in the third; elsewhere the result is the number of the others. A tensor of one element keeps
#   the NaN of one rank only.
# Version: torch 2.13.0, backend gloo.
# Why it matters: loops take the maximum over ranks of a loss, of a gradient's norm or of a flag to decide together
#   whether a step is skipped. A NaN on one rank can pass such a check as a finite value.
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6
program_of_ranks 3 <<'PYTHON'
import torch
import torch.distributed as dist
from finding import compare, show_versions

show_versions("torch")

for name, operation in (("MAX", dist.ReduceOp.MAX), ("MIN", dist.ReduceOp.MIN)):
    seen = []
    for owner in range(3):
        values = torch.full((6,), float("nan") if dist.get_rank() == owner else 1.0)
        dist.all_reduce(values, op=operation)
        seen.append("".join("N" if value else "1" for value in values.isnan()))
    compare(
        f"{name} over three ranks of six values, if rank 0, 1 or 2 has NaN (N) and the others have 1",
        guess=["NNNNNN"] * 3,
        seen=seen,
        known=["NN1111", "11NN11", "1111NN"],
    )
PYTHON
