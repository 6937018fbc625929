#!/usr/bin/env bash
# Guess: gather_for_metrics over a loader with a SubsetRandomSampler, the usual split of one dataset into two, returns
#   each sample of the sampler once. Without the sampler, over a Subset, it does.
# Seen: it computes how many samples of the last batch are padding from the length of the dataset, not of the sampler.
#   With 30 validation samples in a dataset of 100 it drops two real samples; with 26 in one of 103 five are counted
#   twice; a RandomSampler of 10 samples returns 16. With one process all are right.
# Version: accelerate 1.15.0 with torch 2.13.0, two processes.
# Why it matters: accuracies and losses leave out samples or count some twice, other ones in each epoch as the order is
#   random, and the figures change with the number of processes. Use a Subset in place of the sampler.
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6 accelerate==1.15.0
program_of_ranks 2 <<'PYTHON'
import os

os.environ["ACCELERATE_USE_CPU"] = "1"

import torch
from accelerate import Accelerator
from finding import compare, show_versions
from torch.utils.data import DataLoader, RandomSampler, Subset, SubsetRandomSampler, TensorDataset

show_versions("accelerate", "torch")
accelerator = Accelerator()


def counts(size, chosen, sampler=None):
    """Return how many samples an evaluation in batches of 4 returns, and how many different ones."""
    data = TensorDataset(torch.arange(size))
    if sampler is None:
        loader = DataLoader(Subset(data, chosen), batch_size=4)
    else:
        loader = DataLoader(data, batch_size=4, sampler=sampler(data, chosen))
    seen = []
    for (numbers,) in accelerator.prepare(loader):
        seen += accelerator.gather_for_metrics(numbers).tolist()
    return [len(seen), len(set(seen))]


def of_indices(data, chosen):
    return SubsetRandomSampler(chosen)


def of_count(data, chosen):
    return RandomSampler(data, num_samples=len(chosen))


for words, size, chosen, sampler, known in (
    ("a Subset of 30 of 100", 100, range(50, 80), None, [30, 30]),
    ("a SubsetRandomSampler of 30 of 100", 100, range(50, 80), of_indices, [28, 28]),
    ("a SubsetRandomSampler of 26 of 103", 103, range(50, 76), of_indices, [31, 26]),
    ("a RandomSampler of 10 of 96", 96, range(10), of_count, [16, 10]),
):
    compare(
        f"samples in the result, and different ones; {words}",
        guess=[len(chosen)] * 2,
        seen=counts(size, chosen, sampler),
        known=known,
    )
PYTHON
