#!/usr/bin/env bash
# Guess: if ranks save different values of a plain tensor under one key, the file has those of rank 0, as with
#   torch.save on rank 0.
# Seen: each key has the value of another rank: the planner gives a key to the rank that has least to write so far. The
#   checkpoint is a mixture that no rank ever had, here a mean of rank 2 beside a variance of rank 0.
# Version: torch 2.13.0, torch.distributed.checkpoint with its default planner.
# Why it matters: FSDP2 neither shards nor broadcasts buffers, so statistics of BatchNorm, random states and counters of
#   samples differ between ranks. After a load each rank has the same mixture; which one depends on the sizes of others.
# keepstep: keepstep.checkpoint.save stores one rank's value too, and raises an error with check_replicas=True:
#   tests/unit/keepstep/checkpoint/test_save_and_load.py::test_replicas_that_differ_are_an_error_on_request
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6
program_of_ranks 3 <<'PYTHON'
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from finding import compare, show_versions

show_versions("torch")

norm = torch.nn.BatchNorm1d(4)
norm.running_mean.fill_(dist.get_rank())
norm.running_var.fill_(dist.get_rank())
norm.num_batches_tracked.fill_(dist.get_rank())
dcp.save(norm.state_dict(), checkpoint_id="checkpoint")
loaded = torch.nn.BatchNorm1d(4).state_dict()
dcp.load(loaded, checkpoint_id="checkpoint")
names = ("running_mean", "running_var", "num_batches_tracked")
compare(
    "rank whose value was stored, for each buffer of a BatchNorm",
    guess=dict.fromkeys(names, 0),
    seen={name: int(loaded[name].flatten()[0]) for name in names},
    known={"running_mean": 2, "running_var": 0, "num_batches_tracked": 1},
)
PYTHON
