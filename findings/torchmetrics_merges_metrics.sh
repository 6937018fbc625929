#!/usr/bin/env bash
# Guess: each metric of a MetricCollection counts for itself, so recall at a threshold of 0.5 and recall at 0.9 differ
#   as soon as a sample lies between them.
# Seen: after the first batch the collection compares the states of its metrics, and puts those of one kind whose states
#   are equal into one group. From then on it updates one metric of a group, and all return that one's value, also after
#   reset. Whether the values are right depends on the order of the batches.
# Version: torchmetrics 1.9.0 with torch 2.13.0, MetricCollection with compute_groups=True (default).
# Why it matters: metrics that differ in a threshold or in ignore_index often agree on one batch. The values are then
#   wrong for the rest of the run without a message, and look like a metric that its parameter does not change.
#   compute_groups=False gives the right ones.
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6 torchmetrics==1.9.0
program <<'PYTHON'
import torch
from finding import compare, show_versions
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryRecall

show_versions("torchmetrics", "torch")
sure, unsure = torch.tensor([0.95, 0.05]), torch.tensor([0.6, 0.4])
target = torch.tensor([1, 0])


def recalls(*batches, **arguments):
    metrics = MetricCollection({"low": BinaryRecall(0.5), "high": BinaryRecall(0.9)}, **arguments)
    values = []
    for _ in range(2):  # two epochs
        for predictions in batches:
            metrics.update(predictions, target)
        computed = metrics.compute()
        values.append([computed["low"].item(), computed["high"].item()])
        metrics.reset()
    return values


right = [[1.0, 0.5], [1.0, 0.5]]
for words, seen, known in (
    ("unsure batch first", recalls(unsure, sure), right),
    ("unsure batch second", recalls(sure, unsure), [[0.5, 0.5], [0.5, 0.5]]),
    ("unsure batch second, compute_groups=False", recalls(sure, unsure, compute_groups=False), right),
):
    compare(f"recall at 0.5 and at 0.9 in two epochs; {words}", guess=right, seen=seen, known=known)
PYTHON
