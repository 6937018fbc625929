#!/usr/bin/env bash
# Guess: a reduction of a sharded DTensor followed by .item(), float() or bool() is the value of the whole tensor, as
#   its shape of () and its other methods say.
# Seen: it is that of the shard of this rank for sum, norm, max and any, and that of the whole for median and argmax:
#   the first keep a pending reduction over ranks (Partial), which .item() does not carry out. The mean is that of the
#   shard if the ranks have equally many elements, and that of the whole if not.
# Version: torch 2.13.0, torch.distributed.tensor.
# Why it matters: a norm in a log is too small by a factor that depends on the sharding. A check such as `if
#   gradient.isnan().any()` is true on one rank only, so that rank alone skips the step and the job stops or its ranks
#   drift apart. full_tensor() before .item() gives the value of the whole.
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6
program_of_ranks 2 <<'PYTHON'
import torch
from finding import compare, of_all_ranks, show_versions
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

show_versions("torch")
mesh = init_device_mesh("cpu", (2,))
vector = distribute_tensor(torch.tensor([1.0, 2.0, 3.0, 6.0]), mesh, [Shard(0)])

compare(
    "reductions of 1, 2, 3, 6 in two shards, read with .item() on each rank",
    guess={"sum": [12.0, 12.0], "max": [6.0, 6.0], "mean": [3.0, 3.0], "median": [2.0, 2.0]},
    seen={name: of_all_ranks(getattr(vector, name)().item()) for name in ("sum", "max", "mean", "median")},
    known={"sum": [3.0, 9.0], "max": [2.0, 6.0], "mean": [1.5, 4.5], "median": [2.0, 2.0]},
)
uneven = distribute_tensor(torch.tensor([1.0, 2.0, 3.0, 6.0, 8.0]), mesh, [Shard(0)])
compare(
    "mean of 1, 2, 3, 6, 8, read with .item() on each rank",
    guess=[4.0, 4.0],
    seen=of_all_ranks(uneven.mean().item()),
    known=[4.0, 4.0],
)
gradient = distribute_tensor(torch.tensor([1.0, 2.0, 3.0, float("nan")]), mesh, [Shard(0)])
compare(
    "whether a gradient with a NaN in its last element has one, as each rank reads it",
    guess=[True, True],
    seen=of_all_ranks(bool(gradient.isnan().any())),
    known=[False, True],
)
PYTHON
