#!/usr/bin/env bash
# Guess: if two streams are interleaved one by one and divided with split_dataset_by_node, each rank has half of each.
# Seen: with fewer shards than ranks each rank keeps every n-th example of the whole stream. The turns of the mixture
#   and the turns of the ranks coincide, so that each of four ranks reads one source alone; with three ranks all read
#   both.
# Version: datasets 5.2.0, interleave_datasets without probabilities.
# Why it matters: the mixture of a batch, statistics of BatchNorm and losses by rank depend on the number of ranks.
#   After a restart with another number of ranks the data of each rank is of another kind.
source "$(dirname "$0")/environment"
packages datasets==5.2.0
program <<'PYTHON'
from datasets import Dataset, interleave_datasets
from datasets.distributed import split_dataset_by_node
from finding import compare, show_versions

show_versions("datasets")


def source(name):
    return Dataset.from_dict({"x": [name] * 12}).to_iterable_dataset(num_shards=2)


mixture = interleave_datasets([source("a"), source("b")])
for ranks, known in ((3, ["abababab", "babababa", "abababa"]), (4, ["aaaaaa", "bbbbbb", "aaaaaa", "bbbbb"])):
    parts = [split_dataset_by_node(mixture, rank, ranks) for rank in range(ranks)]
    compare(
        f"sources of the examples of each of {ranks} ranks, from two sources of two shards",
        guess="a and b on each",
        seen=["".join(example["x"] for example in part) for part in parts],
        known=known,
    )
PYTHON
