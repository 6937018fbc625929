#!/usr/bin/env bash
# Guess: a `break` out of an evaluation in the middle of a training epoch does not change when gradients are
#   synchronized.
# Seen: the prepared loader that was left stays Accelerate's active one. The end of the training loader is then not
#   noticed: the last, incomplete accumulation of each epoch takes no step, and its gradients count in the next epoch.
#   An evaluation that runs to its end does no harm.
# Version: accelerate 1.15.0 with torch 2.13.0, gradient_accumulation_steps=2.
# Why it matters: `if i == 50: break` is the usual way to evaluate on a few batches. It changes the number of optimizer
#   steps and the batches of one step for the rest of the run, without an error.
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6 accelerate==1.15.0
program <<'PYTHON'
import torch
from accelerate import Accelerator
from finding import compare, show_versions
from torch.utils.data import DataLoader

show_versions("accelerate", "torch")


def batches_of_steps(evaluated):
    """Return the batches of each optimizer step, of two epochs of 5 batches; evaluate on some of 4 after the second."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training, evaluation = DataLoader(torch.ones(5, 1)), DataLoader(torch.ones(4, 1))
    model, optimizer, training, evaluation = accelerator.prepare(model, optimizer, training, evaluation)
    steps, since = [], 0
    for _ in range(2):
        for index, batch in enumerate(training):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).sum())
                optimizer.step()
                optimizer.zero_grad()
            since += 1
            if accelerator.sync_gradients:
                steps.append(since)
                since = 0
            if index == 1:
                for taken, _ in enumerate(evaluation, 1):
                    if taken == evaluated:
                        break
    return steps


for evaluated, known in ((5, [2, 2, 1, 2, 2, 1]), (2, [2, 2, 2, 2, 2])):
    compare(
        f"batches of each step, evaluation {'complete' if evaluated > 4 else f'left after batch {evaluated} of 4'}",
        guess=[2, 2, 1, 2, 2, 1],
        seen=batches_of_steps(evaluated),
        known=known,
    )
PYTHON
