#!/usr/bin/env bash
# Guess: a net with Checkpoint, LoadInitState and LRScheduler goes on in its schedule when it is fitted again: the
#   history is loaded, and LRScheduler has parameters of its own history.
# Seen: no file has the scheduler. A new one begins at its first epoch, with the learning rate that the optimizer was
#   saved with as its base. A schedule of steps counts from the break on, and a cosine anneals once more, from the rate
#   of the break, so that the training ends at a rate that is far from its end.
# Version: skorch 1.4.0 with torch 2.13.0.
# Why it matters: a net that is interrupted often stays at a low rate for a long time, or ends before its rate is low.
#   The history has no break: its epochs go on counting.
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6 scikit-learn==1.9.1 skorch==1.4.0
program <<'PYTHON'
import numpy as np
import torch
from finding import compare, show_versions
from sklearn.datasets import load_digits
from skorch import NeuralNetClassifier
from skorch.callbacks import Checkpoint, EpochScoring, LoadInitState, LRScheduler
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

show_versions("skorch", "scikit-learn", "torch")
pixels, labels = load_digits(return_X_y=True)


def rates(policy, epochs, folder, **options):
    """Fit a net that saves to and loads from a folder, and return the learning rate of each epoch so far."""
    saving = Checkpoint(monitor=None, dirname=folder)
    rate = EpochScoring(lambda net, *_: net.optimizer_.param_groups[0]["lr"], name="rate", on_train=True)
    net = NeuralNetClassifier(
        torch.nn.Sequential(torch.nn.Linear(64, 10)),
        criterion=torch.nn.CrossEntropyLoss,
        lr=0.08,
        max_epochs=epochs,
        train_split=None,
        callbacks=[rate, LRScheduler(policy, **options), saving, LoadInitState(saving)],
        verbose=0,
    )
    net.fit(pixels.astype(np.float32), labels)
    return [round(value, 4) for value in net.history[:, "rate"]]


for policy, options, known in (
    (StepLR, {"step_size": 3, "gamma": 0.5}, [0.08, 0.08, 0.08, 0.04, 0.04, 0.04, 0.04, 0.02]),
    (CosineAnnealingLR, {"T_max": 8}, [0.08, 0.077, 0.0683, 0.0553, 0.04, 0.0385, 0.0341, 0.0277]),
):
    name = policy.__name__
    whole = rates(policy, 8, f"{name}-whole", **options)
    rates(policy, 4, f"{name}-resumed", **options)
    resumed = rates(policy, 4, f"{name}-resumed", **options)
    compare(f"learning rates of 8 epochs with a break after 4, {name}", guess=whole, seen=resumed, known=known)
PYTHON
