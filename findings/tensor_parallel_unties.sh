#!/usr/bin/env bash
# Guess: parallelize_module keeps weights that two modules share, or refuses a plan with both (fully_shard refuses).
# Seen: each module of the plan gets a new parameter of its own. The model has one parameter more, each copy has only
#   its own part of the gradient, and the copies are trained apart.
# Version: torch 2.13.0, torch.distributed.tensor.parallel.
# Why it matters: language models share the weight of the embedding and of the output layer. Sharded for tensor
#   parallelism, the model is another one, with more parameters and optimizer state, and its loss falls as usual. A
#   checkpoint that is loaded into the tied model keeps one of the two. Tie them again after parallelize_module.
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6
program_of_ranks 2 <<'PYTHON'
import torch
from finding import compare, show_versions
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

show_versions("torch")
plan = {"embedding": RowwiseParallel(input_layouts=Replicate()), "output": ColwiseParallel(output_layouts=Replicate())}


def trained(parallel):
    """Return the number of parameters, and whether both layers have one weight after a step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential()
    model.add_module("embedding", torch.nn.Embedding(6, 4))
    model.add_module("output", torch.nn.Linear(4, 6, bias=False))
    model.output.weight = model.embedding.weight
    if parallel:
        parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.arange(3)).square().mean().backward()
    optimizer.step()
    first, second = (
        weight.full_tensor() if hasattr(weight, "full_tensor") else weight
        for weight in (model.embedding.weight, model.output.weight)
    )
    return len(list(model.parameters())), torch.equal(first, second)


for words, parallel, known in (("plain", False, (1, True)), ("parallelize_module over two ranks", True, (2, False))):
    compare(
        f"parameters, and whether the tied weights are equal after a step; {words}",
        guess=(1, True),
        seen=trained(parallel),
        known=known,
    )
PYTHON
