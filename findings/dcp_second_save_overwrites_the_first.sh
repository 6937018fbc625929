#!/usr/bin/env bash
# Guess: async_save copies the state before it returns, so a checkpoint has the values of the moment of its own call,
#   also if the next call comes before slow storage has taken the first.
# Seen: that is right without a stager. A DefaultStager that is kept for all saves, so that it need not allocate memory
#   again, has one copy of each tensor and writes the next state into it while the first save still reads it. Both
#   checkpoints then have the values of the second call, or the first is a mixture. Nothing waits or warns.
# Version: torch 2.13.0, torch.distributed.checkpoint, DefaultStager; StagingOptions do not matter.
# Why it matters: a write that takes longer than usual, as to storage over a network, damages the checkpoint that is
#   being written, and it is committed as complete. Wait for the future of a save before the next one, or pass no
#   stager.
# keepstep: any number of its saves may be in progress, each with a copy of its own
#   (tests/unit/keepstep/checkpoint/test_save_and_load.py::test_the_state_may_change_after_async_save_returned). With
#   async_stager, torch's save runs.
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6
program <<'PYTHON'
import threading

import torch
import torch.distributed.checkpoint as dcp
from finding import compare, show_versions
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

show_versions("torch")
reachable = threading.Event()


class SlowStorage(dcp.FileSystemWriter):
    """Takes no data until it is reachable."""

    def write_data(self, plan, planner):
        reachable.wait(60)
        return super().write_data(plan, planner)


def saved(name, stager):
    """Save in steps 1 and 2 before the storage is reachable, and return the values of both checkpoints."""
    weight = torch.zeros(4)
    reachable.clear()
    futures = []
    for step in (1, 2):
        weight.fill_(step)
        storage = SlowStorage(f"{name}-{step}")
        futures.append(dcp.async_save({"weight": weight}, storage_writer=storage, async_stager=stager))
    reachable.set()
    for future in futures:
        future.result()
    values = []
    for step in (1, 2):
        state = {"weight": torch.zeros(4)}
        dcp.load(state, checkpoint_id=f"{name}-{step}")
        values.append(state["weight"][0].item())
    return values


options = StagingOptions(
    use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
)
stagers = (("no stager", None, [1.0, 2.0]), ("one DefaultStager", DefaultStager(options), [2.0, 2.0]))
for words, stager, known in stagers:
    seen = saved(words.replace(" ", "-"), stager)
    compare(f"values in the checkpoints of steps 1 and 2, {words}", guess=[1.0, 2.0], seen=seen, known=known)
PYTHON
