#!/usr/bin/env bash
# Guess: a pass in a torch.autocast region computes with the weights of that moment, however long the region is.
# Seen: the outermost region keeps the bfloat16 copy of each float32 weight from its first use until it ends, and a
#   write to the weight does not change the copy. In a region around the loop the optimizer changes the weights, with
#   gradients of the first model, and no pass sees it. In a region around an evaluation, load_state_dict has no effect
#   on the next pass. cache_enabled=False, or a region for each pass, gives the right values.
# Version: torch 2.13.0, torch.autocast on the CPU.
# Why it matters: a comparison of checkpoints, or of a model with its moving average, in one region gives all of them
#   the numbers of the first. A loop inside a region trains on a model that never changes. Weights and their norms do
#   change, so only a loss that stays tells it.
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6
program <<'PYTHON'
import contextlib

import torch
from finding import compare, show_versions

show_versions("torch")
inputs = torch.ones(1, 1)


def model_of_one():
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    return model


def region(**arguments):
    return torch.autocast("cpu", torch.bfloat16, **arguments)


def outputs_of_a_training(around_loop):
    """Return the outputs of 4 passes: the weight, which falls by 0.25 in each step."""
    model, outputs = model_of_one(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    with around_loop:
        for _ in range(4):
            with region():
                output = model(inputs)
            outputs.append(output.item())
            output.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return outputs


def outputs_of_two_checkpoints(around_evaluation):
    model, outputs = model_of_one(), []
    with around_evaluation, torch.no_grad():
        for weight in (2.0, 3.0):
            model.load_state_dict({"weight": torch.tensor([[weight]])})
            outputs.append(model(inputs).item())
    return outputs


falling = [1.0, 0.75, 0.5, 0.25]
without_cache = outputs_of_two_checkpoints(region(cache_enabled=False))
for words, seen, guess, known in (
    ("a region in each pass", outputs_of_a_training(contextlib.nullcontext()), falling, falling),
    ("another one around the loop", outputs_of_a_training(region()), falling, [1.0, 1.0, 1.0, 1.0]),
    ("two checkpoints in one region", outputs_of_two_checkpoints(region()), [2.0, 3.0], [2.0, 2.0]),
    ("the same with cache_enabled=False", without_cache, [2.0, 3.0], [2.0, 3.0]),
):
    compare(f"outputs of a layer, its weight at that moment; {words}", guess=guess, seen=seen, known=known)
PYTHON
