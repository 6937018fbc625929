#!/usr/bin/env bash
# Guess: with_indices=True gives each example of a stream its index in the dataset, so that a filter by index cuts it
#   into the same two parts on each number of ranks and workers.
# Seen: each rank of split_dataset_by_node and each worker of a DataLoader counts its own examples from 0. An index
#   occurs once for each of them, and the parts are others on each number of ranks: here two ranks train on 4 of the 6
#   samples that one process holds out.
# Version: datasets 5.2.0, IterableDataset.
# Why it matters: `index % 10 == 0` is a usual way to hold out a validation set of a stream, and an index a usual id of
#   a sample. The held out samples are trained on, the validation loss is too good, and ids are not unique. It begins
#   when the job gets more ranks or workers, without a message.
source "$(dirname "$0")/environment"
packages datasets==5.2.0
program <<'PYTHON'
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from finding import compare, show_versions

show_versions("datasets")


def samples(training, ranks):
    """Return the samples, over all ranks, of the part of 16 that is trained on or held out: the latter has each third index."""
    stream = Dataset.from_dict({"sample": list(range(16))}).to_iterable_dataset(num_shards=8)
    part = stream.filter(lambda _, index: (index % 3 != 0) == training, with_indices=True)
    return {example["sample"] for rank in range(ranks) for example in split_dataset_by_node(part, rank, ranks)}


held_out = samples(training=False, ranks=1)
for ranks, known in ((1, 0), (2, 4), (4, 2)):
    compare(
        f"held out samples, of 6, in the training of {ranks} rank(s)",
        guess=0,
        seen=len(samples(training=True, ranks=ranks) & held_out),
        known=known,
    )


def indexes(ranks):
    stream = Dataset.from_dict({"sample": list(range(16))}).to_iterable_dataset(num_shards=8)
    numbered = stream.map(lambda _, index: {"index": index}, with_indices=True)
    return sorted(example["index"] for rank in range(ranks) for example in split_dataset_by_node(numbered, rank, ranks))


compare("indexes of 16 samples over 2 ranks", guess=list(range(16)), seen=indexes(2), known=sorted([*range(8)] * 2))
PYTHON
