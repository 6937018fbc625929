#!/usr/bin/env bash
# Guess: IterableDataset.load_state_dict goes on where state_dict was called: the state has an entry `epoch`.
# Seen: the state has effect only while the dataset's epoch is that of the state. A new process is in epoch 0, so a
#   state of epoch 1 is dropped without a word, and the dataset starts from its first example, shuffled or not. If the
#   epoch does match, each later pass starts at the resumed example too, until set_epoch is called: the examples before
#   it never come again, and a state of the end gives empty epochs.
# Version: datasets 5.2.0.
# Why it matters: a resume in a later epoch trains twice on what it has seen; one in the first epoch can lose a part of
#   the data for the rest of the run. Call set_epoch before load_state_dict's first pass, and before each pass after.
# keepstep: its loader calls set_epoch before each pass and stores the epoch with the step:
#   tests/services/manager/test_data_bridges.py::test_a_stream_goes_on_in_the_middle_of_an_epoch_and_reads_no_more_than_it_must
source "$(dirname "$0")/environment"
packages datasets==5.2.0
program <<'PYTHON'
from datasets import Dataset
from finding import compare, show_versions

show_versions("datasets")


def stream():
    return Dataset.from_dict({"x": list(range(6))}).to_iterable_dataset(num_shards=2)


def state_after(epoch, count):
    dataset = stream()
    dataset.set_epoch(epoch)
    examples = iter(dataset)
    for _ in range(count):
        next(examples)
    return dataset.state_dict()


def passes(state, count):
    dataset = stream()
    dataset.load_state_dict(state)
    return [[example["x"] for example in dataset] for _ in range(count)]


compare(
    "rest of epoch 1 after 4 of 6 examples, in a new dataset",
    guess=[[4, 5]],
    seen=passes(state_after(1, 4), 1),
    known=[[0, 1, 2, 3, 4, 5]],
)
compare(
    "rest of epoch 0 after 4 of 6 examples, and the next pass",
    guess=[[4, 5], [0, 1, 2, 3, 4, 5]],
    seen=passes(state_after(0, 4), 2),
    known=[[4, 5], [4, 5]],
)
PYTHON
