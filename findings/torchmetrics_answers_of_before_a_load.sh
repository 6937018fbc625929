#!/usr/bin/env bash
# Guess: after metric.load_state_dict(state), compute() returns the value of the loaded state, as a module computes with
#   the loaded weights.
# Seen: compute() keeps its result until update() or reset(), and load_state_dict clears nothing: a metric that has
#   computed once answers with the value of before the load. A new metric, and one after the next update(), are right.
# Version: torchmetrics 1.9.0 with torch 2.13.0, metrics with persistent states.
# Why it matters: a loop that evaluates, goes back to a checkpoint in the same process and reads its metrics, gets the
#   value of the state that it has left. Choices of the best checkpoint and early stops then rest on it. No warning: the
#   states themselves are the loaded ones.
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6 torchmetrics==1.9.0
program <<'PYTHON'
from finding import compare, show_versions
from torchmetrics import MeanMetric

show_versions("torchmetrics", "torch")


def values(before):
    """Return the mean after ``before`` has prepared a metric for the load of one whose mean is 5."""
    saved, metric = MeanMetric(), MeanMetric()
    for one in (saved, metric):
        one.persistent(mode=True)
    saved.update(5.0)
    metric.update(1.0)
    before(metric)
    metric.load_state_dict(saved.state_dict())
    return [metric.compute().item(), (metric.mean_value / metric.weight).item()]


for words, before, known in (
    ("no compute() before", lambda metric: None, [5.0, 5.0]),
    ("compute() before", lambda metric: metric.compute(), [1.0, 5.0]),
    ("compute() and reset() before", lambda metric: (metric.compute(), metric.reset()), [5.0, 5.0]),
):
    subject = f"compute() after the load of a mean of 5, and the mean of the states; {words}"
    compare(subject, guess=[5.0, 5.0], seen=values(before), known=known)
PYTHON
