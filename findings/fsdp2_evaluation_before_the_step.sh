#!/usr/bin/env bash
# Guess: a pass under no_grad, as for a validation loss, has no effect on the training around it.
# Seen: after such a pass the root's parameters stay gathered, and only a backward pass frees them (the root has
#   reshard_after_forward=False, by default). If the pass stands between backward() and step(), the step changes the
#   shards, and the next forward pass computes with the gathered values of before the step. If the optimizer is made
#   after the pass, parameters() gives it the gathered tensors: no step has any effect. model.reshard() after the pass
#   helps.
# Version: torch 2.13.0, torch.distributed.fsdp.fully_shard.
# Why it matters: each step after such a log has a gradient of a model whose root is one step old, beside inner layers
#   that are new. A job that checks its model with one batch before it makes the optimizer trains nothing, and the only
#   sign is a loss that stays. In both cases saved weights, names and shapes look right.
# keepstep: average_over_groups refuses a model in that state:
#   tests/unit/keepstep/test_device_mesh.py::test_a_model_that_an_evaluation_left_gathered_is_refused_until_it_is_resharded
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6
program_of_ranks 2 <<'PYTHON'
import torch
from finding import compare, show_versions
from torch.distributed.fsdp import fully_shard

show_versions("torch")
inputs = torch.ones(1, 1)


def outputs(evaluated_before_optimizer=False, evaluated_before_step=False, resharded=False):
    """Return the output of 4 forward passes: the weight, which begins with 1 and falls by 0.25 in each step."""
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    fully_shard(model)

    def evaluate():
        with torch.no_grad():
            model(inputs)
        if resharded:
            model.reshard()

    if evaluated_before_optimizer:
        evaluate()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    seen = []
    for _ in range(4):
        output = model(inputs)
        seen.append(output.item())
        output.sum().backward()
        if evaluated_before_step:
            evaluate()
        optimizer.step()
        optimizer.zero_grad()
    return seen


falling = [1.0, 0.75, 0.5, 0.25]
for words, arguments, known in (
    ("no evaluation", {}, falling),
    ("evaluation between backward and step", {"evaluated_before_step": True}, [1.0, 1.0, 0.75, 0.5]),
    ("evaluation before the optimizer is made", {"evaluated_before_optimizer": True}, [1.0, 1.0, 1.0, 1.0]),
    (
        "both, each with model.reshard() after it",
        {"evaluated_before_step": True, "evaluated_before_optimizer": True, "resharded": True},
        falling,
    ),
):
    compare(f"weight in four training passes; {words}", guess=falling, seen=outputs(**arguments), known=known)
PYTHON
