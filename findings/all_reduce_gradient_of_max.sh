#!/usr/bin/env bash
# Guess: the all_reduce of torch.distributed.nn.functional, which has a backward pass, gives the gradient of its
#   operation: of MAX to the largest value, of PRODUCT with the factors of the other ranks.
# Seen: its backward pass runs the same operation on the gradients. For SUM that is right. For MAX the largest value of
#   each rank gets a gradient, as if it had won; for PRODUCT the factors of the other ranks are missing. A log-sum-exp
#   over shards that subtracts the maximum, whose gradient is the softmax, is wrong too.
# Version: torch 2.13.0, torch.distributed.nn.functional.
# Why it matters: a maximum over parts of a sequence or over a sharded vocabulary trains entries that were not selected.
#   The forward pass is right, and the gradients have a usual size. Where the maximum must cancel, detach() it.
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6
program_of_ranks 2 <<'PYTHON'
import torch
import torch.distributed as dist
from finding import compare, of_all_ranks, show_versions
from torch.distributed.nn.functional import all_reduce

show_versions("torch")
whole = torch.tensor([1.0, 2.0, 3.0, 4.0])


def log_sum_exp(shard):
    largest = all_reduce(shard.max(), op=dist.ReduceOp.MAX)
    return largest + all_reduce((shard - largest).exp().sum()).log()


def gradient_of_shards(function):
    """Return the gradient, averaged over the two equal results as DistributedDataParallel does it."""
    shard = whole.chunk(2)[dist.get_rank()].clone().requires_grad_()
    (function(shard) / 2).backward()
    return [round(value, 2) for part in of_all_ranks(shard.grad.tolist()) for value in part]


def gradient_of_whole(function):
    vector = whole.clone().requires_grad_()
    function(vector).backward()
    return [round(value, 2) for value in vector.grad.tolist()]


for words, in_parts, at_once, known in (
    ("sum", lambda shard: all_reduce(shard.sum()), torch.sum, [1.0, 1.0, 1.0, 1.0]),
    ("max", lambda shard: all_reduce(shard.max(), op=dist.ReduceOp.MAX), torch.max, [0.0, 0.5, 0.0, 0.5]),
    ("product", lambda shard: all_reduce(shard.prod(), op=dist.ReduceOp.PRODUCT), torch.prod, [0.5, 0.25, 1.0, 0.75]),
    ("log-sum-exp", log_sum_exp, lambda vector: vector.logsumexp(0), [0.03, 0.47, 0.24, 1.02]),
):
    guess = gradient_of_whole(at_once)
    seen = gradient_of_shards(in_parts)
    compare(f"gradient of the {words} of 1, 2 | 3, 4 on two ranks", guess=guess, seen=seen, known=known)
PYTHON
