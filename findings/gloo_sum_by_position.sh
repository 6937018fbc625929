#!/usr/bin/env bash
# Guess: if each rank has one value in all elements of a tensor, all elements of the sum over ranks are equal.
# Seen: they differ: Gloo adds the ranks in another order in each segment of the tensor, and float32 is not associative.
#   Here one element is summed to 0, another to 1.2e-07.
# Version: torch 2.13.0, backend gloo.
# Why it matters: the bits of a gradient depend on its place in a bucket. Another bucket size, a frozen layer, or
#   gradients reduced one by one instead of flat give other weights from the same data; a comparison of runs by digest
#   has to fix the buckets too.
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6
program_of_ranks 4 <<'PYTHON'
import torch
import torch.distributed as dist
from finding import compare, show_versions

show_versions("torch")

own = [1.0, 3e-8, -1.0, 3e-8][dist.get_rank()]
values = torch.full((4096,), own)
dist.all_reduce(values)
compare(
    "different values among 4096 sums of 1, 3e-8, -1 and 3e-8",
    guess="one",
    seen=[f"{value:.1e}" for value in values.unique().tolist()],
    known=["0.0e+00", "3.0e-08", "9.0e-08", "1.2e-07"],
)
PYTHON
