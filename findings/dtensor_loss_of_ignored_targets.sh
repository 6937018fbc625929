#!/usr/bin/env bash
# Guess: cross_entropy of a sharded batch, a DTensor, is the mean over all targets that are not ignored, as for one rank
#   and as its gradient says.
# Seen: it is the mean of the means of the shards, so a token counts more on a rank with fewer tokens. The gradient is
#   that of the right mean: loss and gradient are of two different functions. Weights of classes have the same effect.
#   A shard in which all targets are ignored makes the loss NaN, beside a right gradient.
# Version: torch 2.13.0, torch.distributed.tensor.
# Why it matters: padded and masked tokens are ignored targets, and their number differs between ranks in each step. The
#   logged loss depends on the number of ranks; a check such as "skip the step if the loss is not finite" skips steps
#   whose gradient is right.
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6
program_of_ranks 2 <<'PYTHON'
import torch
import torch.nn.functional as functional
from finding import compare, show_versions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

show_versions("torch")
mesh = init_device_mesh("cpu", (2,))
logits = torch.tensor([[0.0, 0.0], [0.0, 0.0], [3.0, 0.0], [3.0, 0.0]])  # 0.69 each for target 0, then 0.05 each


def loss_and_gradient(targets, weights, sharded):
    def place(tensor, placement):
        return distribute_tensor(tensor, mesh, [placement]) if sharded else tensor.clone()

    leaf = place(logits, Shard(0)).requires_grad_()
    class_weights = None if weights is None else place(torch.tensor(weights), Replicate())
    loss = functional.cross_entropy(leaf, place(torch.tensor(targets), Shard(0)), weight=class_weights)
    loss.backward()
    gradient = leaf.grad
    if sharded:
        loss, gradient = loss.full_tensor(), gradient.full_tensor()
    return loss.item(), gradient


for words, targets, weights, known in (
    ("no target is ignored", [0, 0, 0, 0], None, ["0.37", "0.37", True]),
    ("one target is ignored", [-100, 0, 0, 0], None, ["0.26", "0.37", True]),
    ("those of rank 0 are ignored", [-100, -100, 0, 0], None, ["0.05", "nan", True]),
    ("classes have the weights 1 and 3", [0, 0, 0, 1], [1.0, 3.0], ["1.76", "1.50", True]),
):
    whole, gradient = loss_and_gradient(targets, weights, sharded=False)
    mean, sharded_gradient = loss_and_gradient(targets, weights, sharded=True)
    compare(
        f"cross_entropy on one rank, over two ranks, and whether the gradients are equal; {words}",
        guess=[f"{whole:.2f}", f"{whole:.2f}", True],
        seen=[f"{whole:.2f}", f"{mean:.2f}", torch.allclose(gradient, sharded_gradient)],
        known=known,
    )
PYTHON
