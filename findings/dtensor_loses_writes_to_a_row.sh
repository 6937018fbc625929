#!/usr/bin/env bash
# Guess: a write to a row of a DTensor, in place, changes the tensor or is refused.
# Seen: if the row's dimension is sharded, torch gathers the tensor into a copy, changes the copy, and forgets it. No
#   error and no warning. With a replicated DTensor the same line writes.
# Version: torch 2.13.0, torch.distributed.tensor and fully_shard (FSDP2).
# Why it matters: nn.Embedding.reset_parameters zeroes the row of padding_idx in that way. A model that is built on the
#   meta device, sharded and then initialized, as is usual with FSDP2, has a random vector for padding. Code that sets
#   the rows of new tokens in an embedding has no effect.
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6
program_of_ranks 2 <<'PYTHON'
import torch
from finding import compare, show_versions
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

show_versions("torch")
mesh = init_device_mesh("cpu", (2,))


def written(placement):
    tensor = distribute_tensor(torch.arange(1.0, 5.0), mesh, [placement])
    tensor[0] = 9.0
    tensor[2:].zero_()
    return tensor.full_tensor().tolist()


compare(
    "1, 2, 3, 4 after tensor[0] = 9 and tensor[2:].zero_(), sharded and replicated",
    guess=[[9.0, 2.0, 0.0, 0.0]] * 2,
    seen=[written(Shard(0)), written(Replicate())],
    known=[[1.0, 2.0, 3.0, 4.0], [9.0, 2.0, 0.0, 0.0]],
)

with torch.device("meta"):
    embedding = torch.nn.Embedding(6, 2, padding_idx=0)
fully_shard(embedding, mesh=mesh)
embedding.to_empty(device="cpu")
embedding.reset_parameters()
compare(
    "whether the vector of padding_idx is zero after reset_parameters",
    guess=True,
    seen=not embedding.weight.full_tensor()[0].any().item(),
    known=False,
)
PYTHON
