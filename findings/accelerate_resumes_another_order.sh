#!/usr/bin/env bash
# Guess: save_state in an epoch, then load_state and skip_first_batches, goes on with the batches that were left of that
#   epoch, as Accelerate's page on checkpoints shows.
# Seen: with a shuffled loader the resumed epoch has another order, so the skipped batches are not the trained ones:
#   some samples come twice in the epoch and others never. With use_seedable_sampler=True the epoch is right, and the
#   next epoch has its order again instead of a new one.
# Version: accelerate 1.15.0 with torch 2.13.0.
# Why it matters: each resume in an epoch trains on other data than the run without it, and no log says so.
# keepstep: its own loader stores the order and the position with the step, and groups that heal go on in the epoch:
#   tests/services/manager/test_epochs.py::test_a_group_that_heals_in_another_epoch_goes_on_in_it
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6 accelerate==1.15.0
program <<'PYTHON'
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from finding import compare, show_versions
from torch.utils.data import DataLoader

show_versions("accelerate", "torch")
SAVED_AFTER = 2


def samples(seedable, resumed):
    """Return the samples of two epochs of 6 batches of 2, each; of a resumed run with those before the save."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=seedable))
    set_seed(0)
    loader = accelerator.prepare(DataLoader(torch.arange(12), batch_size=2, shuffle=True))
    first = []
    if resumed:
        accelerator.load_state("saved")
        first = before[:]
        for batch in accelerator.skip_first_batches(loader, SAVED_AFTER):
            first += batch.tolist()
    else:
        for index, batch in enumerate(loader, 1):
            first += batch.tolist()
            if index == SAVED_AFTER:
                accelerator.save_state("saved")
    return first, [sample for batch in loader for sample in batch.tolist()]


for seedable, known in ((False, [11, False]), (True, [12, True])):
    whole = samples(seedable, resumed=False)
    before = whole[0][: 2 * SAVED_AFTER]
    resumed = samples(seedable, resumed=True)
    compare(
        f"use_seedable_sampler={seedable}: different samples, of 12, in the resumed epoch; whether the next repeats it",
        guess=[12, False],
        seen=[len(set(resumed[0])), resumed[1] == resumed[0]],
        known=known,
    )
    compare(
        f"use_seedable_sampler={seedable}: whether each epoch has the order of the run without a resume",
        guess=[True, True],
        seen=[resumed[0] == whole[0], resumed[1] == whole[1]],
        known=[seedable, False],
    )
PYTHON
