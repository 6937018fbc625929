#!/usr/bin/env bash
# Guess: a hook of a parameter, registered with Tensor.register_hook, changes its gradient also in a sharded model, or
#   the registration is refused.
# Seen: it is never called, whether it was registered before or after fully_shard: autograd runs on the gathered tensor,
#   and FSDP sets the gradient of the shard itself. DistributedDataParallel calls such hooks, and
#   register_post_accumulate_grad_hook works in both.
# Version: torch 2.13.0, torch.distributed.fsdp.fully_shard.
# Why it matters: such hooks mask gradients (rows of an embedding that must stay, pruned weights, a padding vector),
#   clip or scale them by parameter. The same script trains the masked weights as soon as it is sharded.
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6
program_of_ranks 2 <<'PYTHON'
import torch
from finding import compare, show_versions
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

show_versions("torch")


def drop_first_row(gradient):
    return gradient * torch.tensor([[0.0], [1.0]])


def gradient(wrap, registers_first=True, post_accumulate=False):
    model = torch.nn.Linear(1, 2, bias=False)

    def zero_gradient(parameter):
        parameter.grad.zero_()

    def register():
        if post_accumulate:
            model.weight.register_post_accumulate_grad_hook(zero_gradient)
        else:
            model.weight.register_hook(drop_first_row)

    if registers_first:
        register()
    wrapped = wrap(model)
    if not registers_first:
        register()
    wrapped(torch.ones(1, 1)).sum().backward()
    whole = model.weight.grad
    whole = whole.full_tensor() if hasattr(whole, "full_tensor") else whole
    return whole.flatten().tolist()


for words, wrap, arguments, guess, known in (
    ("DistributedDataParallel", DistributedDataParallel, {}, [0.0, 1.0], [0.0, 1.0]),
    ("fully_shard, hook registered before", fully_shard, {}, [0.0, 1.0], [1.0, 1.0]),
    ("fully_shard, hook registered after", fully_shard, {"registers_first": False}, [0.0, 1.0], [1.0, 1.0]),
    (
        "fully_shard, a post-accumulate hook that zeroes all, registered after",
        fully_shard,
        {"registers_first": False, "post_accumulate": True},
        [0.0, 0.0],
        [0.0, 0.0],
    ),
):
    compare(
        f"gradient of ones, after a hook that drops its first row; {words}",
        guess=guess,
        seen=gradient(wrap, **arguments),
        known=known,
    )
PYTHON
