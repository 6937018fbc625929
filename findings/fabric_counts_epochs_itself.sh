#!/usr/bin/env bash
# Guess: a resumed Fabric loop that calls set_epoch(5) on its DistributedSampler gets the order of epoch 5.
# Seen: at the begin of each iteration the loader of setup_dataloaders calls set_epoch itself, with the number of its
#   iterations in this process. A call by the script has no effect, and each new process begins with the order of epoch
#   0. The loader has neither a state nor an argument for the epoch.
# Version: lightning 2.6.6 (Fabric) with torch 2.13.0.
# Why it matters: a job that is resumed once in each epoch trains on one order only, and a job that is resumed in the
#   middle of an epoch and skips what it has seen skips samples of another order: it sees some twice and others never.
#   A sampler whose seed has the epoch added gives each start another order.
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6 lightning==2.6.6
program <<'PYTHON'
import logging

logging.disable()

from finding import compare, show_versions
from lightning.fabric import Fabric
from torch.utils.data import DataLoader, DistributedSampler

show_versions("lightning", "torch")
fabric = Fabric(accelerator="cpu", devices=1)


def new_sampler():
    return DistributedSampler(range(100), num_replicas=2, rank=0, seed=0)


def order_of(epoch):
    sampler = new_sampler()
    sampler.set_epoch(epoch)
    return list(sampler)


def epochs_read(first, by_fabric):
    """Return whose epochs' orders a process reads that resumes in epoch `first` and reads three."""
    loader = DataLoader(range(100), sampler=new_sampler())
    if by_fabric:
        loader = fabric.setup_dataloaders(loader)
    known = [order_of(epoch) for epoch in range(10)]
    epochs = []
    for epoch in range(first, first + 3):
        loader.sampler.set_epoch(epoch)
        epochs.append(known.index([int(sample) for sample in loader]))
    return epochs


for words, by_fabric, known in (("DataLoader", False, [5, 6, 7]), ("with setup_dataloaders", True, [0, 1, 2])):
    seen = epochs_read(5, by_fabric)
    compare(f"orders that a process reads which resumes in epoch 5; {words}", guess=[5, 6, 7], seen=seen, known=known)
PYTHON
