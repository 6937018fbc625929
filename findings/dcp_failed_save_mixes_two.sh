#!/usr/bin/env bash
# Guess: DCP writes .metadata last, so after a save into the folder of an earlier checkpoint that failed on one rank, a
#   load gives the earlier checkpoint.
# Seen: ranks write the new data into files of the same names. The old .metadata names these files and offsets in them,
#   which are right for the new data too. A load of a sharded weight gives the new half of one rank beside the old half
#   of the other, without an error, where each tensor has a file of its own; with one file for each rank the failed rank
#   has emptied its file, and the load raises.
# Version: torch 2.13.0, torch.distributed.checkpoint with FileSystemWriter, which overwrites by default.
# Why it matters: jobs save to one folder ("latest") again and again. A disk that is full on one node, or a kill of one
#   rank during the save, leaves weights that no step ever had, or nothing, and the earlier checkpoint is lost.
# keepstep: keepstep.checkpoint.save needs overwrite=True, and the earlier checkpoint stays whole until the commit:
#   tests/unit/keepstep/checkpoint/test_colliding_saves.py::test_the_earlier_checkpoint_is_whole_until_the_commit_of_one_that_overwrites_it
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6
program_of_ranks 2 <<'PYTHON'
import logging
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from finding import compare, of_all_ranks, show_versions
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

logging.disable()
show_versions("torch")
mesh = init_device_mesh("cpu", (2,))


class Position:
    """The position of a rank in its data, which cannot be written if the disk is full."""

    def __init__(self, full=False):
        self.full = full

    def __getstate__(self):
        if self.full:
            raise OSError(28, "No space left on device")
        return {}


def state(value, full=False):
    weight = distribute_tensor(torch.full((4,), value), mesh, [Shard(0)])
    return {f"position.{dist.get_rank()}": Position(full and dist.get_rank() == 1), "weight": weight}


def loaded_after_a_failed_save(single_file_per_rank):
    folder = of_all_ranks(tempfile.mkdtemp())[0]

    def save(values):
        dcp.save(values, storage_writer=dcp.FileSystemWriter(folder, single_file_per_rank=single_file_per_rank))

    save(state(1.0))
    try:
        save(state(2.0, full=True))
    except CheckpointException:
        pass
    loaded = {"weight": state(0.0)["weight"]}
    try:
        dcp.load(loaded, checkpoint_id=folder)
    except CheckpointException:
        return "an error"
    return loaded["weight"].full_tensor().tolist()


for words, single_file_per_rank, known in (
    ("a file for each tensor", False, [2.0, 2.0, 1.0, 1.0]),
    ("a file for each rank (default)", True, "an error"),
):
    compare(
        f"loaded weight; the first save had 1, the second had 2 and failed on rank 1; {words}",
        guess=[1.0, 1.0, 1.0, 1.0],
        seen=loaded_after_a_failed_save(single_file_per_rank),
        known=known,
    )
PYTHON
