#!/usr/bin/env bash
# Guess: an all-reduce adds element to element by index, or refuses a tensor that is not contiguous (NCCL refuses it).
# Seen: Gloo takes the address of the first element and adds as many elements as the tensor has, in the order of memory.
#   For every second element of a vector it sums elements that are not in the slice, and the last ones of the slice stay
#   as they were. If ranks lay out one matrix by rows and by columns, it adds elements of different indexes.
# Version: torch 2.13.0, backend gloo.
# Why it matters: gradients in channels_last, slices of buffers and transposed weights are summed wrongly on CPU, on one
#   rank or on all, without an error. Tests of a training loop on Gloo then say other things than a run on NCCL.
# keepstep: Manager.allreduce adds by index:
#   tests/services/manager/steps/test_steps.py::test_elements_are_added_by_index_in_any_order_of_memory
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6
program_of_ranks 2 <<'PYTHON'
import torch
import torch.distributed as dist
from finding import compare, of_all_ranks, show_versions

show_versions("torch")

vector = torch.arange(8.0)
dist.all_reduce(vector[::2])
compare(
    "all 8 elements after a sum of every second one over two ranks",
    guess=[0.0, 1.0, 4.0, 3.0, 8.0, 5.0, 12.0, 7.0],
    seen=vector.tolist(),
    known=[0.0, 2.0, 4.0, 6.0, 4.0, 5.0, 6.0, 7.0],
)

matrix = torch.arange(6.0).view(2, 3)
if dist.get_rank() == 1:
    matrix = matrix.t().contiguous().t()  # equal values by columns
dist.all_reduce(matrix)
compare(
    "the sum of equal matrices, by rows on rank 0 and by columns on rank 1, as each rank reads it",
    guess=[[[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]] * 2,
    seen=of_all_ranks(matrix.tolist()),
    known=[[[0.0, 4.0, 3.0], [7.0, 6.0, 10.0]], [[0.0, 3.0, 6.0], [4.0, 7.0, 10.0]]],
)
PYTHON
