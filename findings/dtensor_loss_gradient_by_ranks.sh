#!/usr/bin/env bash
# Guess: the gradient of a loss over a sharded batch, a DTensor, is that of the same loss over the whole batch.
# Seen: it is for cross_entropy, binary_cross_entropy_with_logits and l1_loss. For mse_loss, smooth_l1_loss and
#   huber_loss it is too large by the number of ranks: the loss is right, and its backward divides by the elements of
#   the shard. (prediction - target).square().mean() is right.
# Version: torch 2.13.0, torch.distributed.tensor, reduction="mean" (default).
# Why it matters: the learning rate of a regression, a value head or a diffusion model grows with the number of ranks,
#   while the logged loss is right. With an adaptive optimizer it shows only in clipping, in weight decay beside other
#   losses, and in the weights of a sum of losses: of such a sum, one term counts by the number of ranks.
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6
program_of_ranks 2 <<'PYTHON'
import torch
import torch.nn.functional as functional
from finding import compare, show_versions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

show_versions("torch")
mesh = init_device_mesh("cpu", (2,))
predictions, targets = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.full((4,), 0.5)


def squares(prediction, target):
    return (prediction - target).square().mean()


def ratios(loss_function):
    """Return loss and gradient of the sharded batch as multiples of those of the whole batch."""
    prediction = predictions.clone().requires_grad_()
    loss = loss_function(prediction, targets)
    loss.backward()
    sharded = distribute_tensor(predictions, mesh, [Shard(0)]).requires_grad_()
    sharded_loss = loss_function(sharded, distribute_tensor(targets, mesh, [Shard(0)]))
    sharded_loss.backward()
    gradient_ratio = (sharded.grad.full_tensor() / prediction.grad).mean()
    return [round((sharded_loss.full_tensor() / loss).item(), 4), round(gradient_ratio.item(), 4)]


for loss_function, known in (
    (squares, [1.0, 1.0]),
    (functional.l1_loss, [1.0, 1.0]),
    (functional.binary_cross_entropy_with_logits, [1.0, 1.0]),
    (functional.mse_loss, [1.0, 2.0]),
    (functional.smooth_l1_loss, [1.0, 2.0]),
    (functional.huber_loss, [1.0, 2.0]),
):
    compare(
        f"loss and gradient of a batch over two ranks, as multiples of those of one rank; {loss_function.__name__}",
        guess=[1.0, 1.0],
        seen=ratios(loss_function),
        known=known,
    )
PYTHON
