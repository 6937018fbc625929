#!/usr/bin/env bash
# Guess: gather_for_metrics returns each sample of an evaluation once, whatever the length of the dataset; that is how
#   it differs from gather.
# Seen: for an IterableDataset with dispatch_batches=False the samples that fill up the last batch stay in the result:
#   16 for a dataset of 10, the first six twice. With dispatch_batches=True (default for streams) the result is right.
# Version: accelerate 1.15.0 with torch 2.13.0, two processes.
# Why it matters: an accuracy or a loss over a validation stream counts samples twice, and how many depends on the
#   number of processes; figures of runs of different size cannot be compared.
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6 accelerate==1.15.0
program_of_ranks 2 <<'PYTHON'
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from finding import compare, show_versions
from torch.utils.data import DataLoader, IterableDataset

show_versions("accelerate", "torch")


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(10))


for dispatched, known in ((True, list(range(10))), (False, [*range(10), *range(6)])):
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatched))
    loader = accelerator.prepare(DataLoader(Stream(), batch_size=4))
    gathered = [sample for batch in loader for sample in accelerator.gather_for_metrics(batch).tolist()]
    compare(
        f"samples 0 to 9 in batches of 4 after gather_for_metrics, dispatch_batches={dispatched}",
        guess=list(range(10)),
        seen=gathered,
        known=known,
    )
PYTHON
