"""Streaming DiLoCo: keepstep run --replicas 2 -- examples/train_diloco.py --fragments 2 --delay 2 --codec two-bit

With `--nproc-per-replica 2` the ranks of a group share the model (FSDP2).
"""

import argparse
import os

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard

from keepstep import Manager, ProcessGroupGloo
from keepstep.collectives.codecs import Quantized, TopK, TwoBit
from keepstep.local_sgd import DiLoCo

CODECS = {"none": lambda: None, "quantized": Quantized, "top-k": lambda: TopK(1 / 16), "two-bit": TwoBit}

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=30, help="outer steps")
parser.add_argument("--sync-every", type=int, default=20, help="inner steps in which every fragment is averaged once")
parser.add_argument("--fragments", type=int, default=1, choices=(1, 2, 4))
parser.add_argument("--delay", type=int, default=0, help="inner steps that overlap the all-reduce")
parser.add_argument("--alpha", type=float, default=0.0, help="weight of a group's own parameters in the result")
parser.add_argument("--codec", default="none", choices=CODECS, help="average with fewer bytes")
args = parser.parse_args()
group, rank, ranks = (int(os.environ.get(name, "0")) for name in ("REPLICA_GROUP_ID", "RANK", "WORLD_SIZE"))

pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
random = torch.Generator().manual_seed(group * max(ranks, 1) + rank)  # each rank draws its own samples

torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3)] + [nn.Linear(64, 10)]
model = nn.Sequential(*layers)
if ranks > 1:
    dist.init_process_group("gloo")  # the ranks of this group; "nccl" on GPUs
    for part in (*layers, model):
        fully_shard(part)
size = len(layers) // args.fragments
fragments = [nn.Sequential(*layers[start : start + size]) for start in range(0, len(layers), size)]

adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)
nesterov = {"lr": 0.7, "momentum": 0.9, "nesterov": True}  # too much for a codec with error feedback
of_outer = {"lr": 1.0} if args.codec in ("top-k", "two-bit") else nesterov
outer = [torch.optim.SGD(one.parameters(), **of_outer) for one in fragments]
state = {"model": model, "optimizer": adamw}
manager = Manager(
    pg=ProcessGroupGloo(),
    use_async_quorum=False,
    state_dict=lambda: {name: part.state_dict() for name, part in state.items()},
    load_state_dict=lambda saved: [part.load_state_dict(saved[name]) for name, part in state.items()],
)
diloco = DiLoCo(
    *(manager, fragments, adamw, outer, args.sync_every),
    fragment_sync_delay=args.delay,
    fragment_update_alpha=args.alpha,
    use_bucketization=True,
    codec=CODECS[args.codec](),
)

with diloco:
    seen = manager.current_step()
    while manager.current_step() < args.steps:
        batch = torch.randint(len(labels), (32,), generator=random)
        adamw.zero_grad()
        loss = nn.functional.cross_entropy(model(pixels[batch].float()), labels[batch])
        loss.backward()
        adamw.step()  # takes an outer step too, at the end of a period
        if manager.current_step() > seen:
            seen = manager.current_step()
            print(f"step {seen} groups {manager.num_participants()} loss {loss.item():.3f}", flush=True)
manager.finish()  # wait until all groups have the final weights
