#!/usr/bin/env bash
# Guess: a StatefulDataLoader whose state was saved after an epoch starts with the next epoch when it is loaded, with
#   torchdata's own StatefulDistributedSampler as with a shuffling loader.
# Seen: with workers it does. Without workers the next epoch is empty: the loop over it ends at once, and the epoch
#   after it is the first that has samples. The state of the sampler says that all samples were given out; in the
#   process of the loader it is loaded before the first pass, and the sampler skips as many.
# Version: torchdata 0.11.0 with torch 2.13.0, num_workers=0 (default).
# Why it matters: most checkpoints are written at the end of an epoch. Each resume from one trains an epoch less, while
#   schedule and count of epochs go on; a loss that is averaged over the epoch is 0/0. Nothing reports it.
# keepstep: its ElasticSampler goes on with the next epoch, in its own loader and in this one:
#   tests/services/manager/test_elastic_data.py::test_a_loader_whose_state_is_of_the_end_of_an_epoch_goes_on_with_the_next_one
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6 torchdata==0.11.0
program <<'PYTHON'
import copy

from finding import compare, show_versions
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

show_versions("torchdata", "torch")
DATA = range(12)


def batches(workers, distributed, epochs, state=None):
    """Return the number of batches of each epoch, and the state after the last one."""
    sampler = StatefulDistributedSampler(DATA, num_replicas=2, rank=0) if distributed else None
    loader = StatefulDataLoader(DATA, batch_size=2, sampler=sampler, shuffle=not distributed, num_workers=workers)
    if state is not None:
        loader.load_state_dict(state)
    counts = []
    for epoch in epochs:
        if distributed:
            sampler.set_epoch(epoch)
        counts.append(sum(1 for _ in loader))
    return counts, copy.deepcopy(loader.state_dict())


for distributed, workers, known in ((False, 0, [6, 6, 6]), (True, 2, [3, 3, 3]), (True, 0, [0, 3, 3])):
    full, state = batches(workers, distributed, range(3))
    seen, _ = batches(workers, distributed, range(3, 6), state)
    kind = "StatefulDistributedSampler of two ranks" if distributed else "shuffle=True"
    subject = f"batches of epochs 3, 4 and 5 after a resume; {kind}, {workers} workers"
    compare(subject, guess=full, seen=seen, known=known)
PYTHON
