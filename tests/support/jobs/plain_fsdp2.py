"""The script of docs/one-copy.md without keepstep: torchrun --standalone --nproc-per-node 4 plain_fsdp2.py"""

import hashlib
import os
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

BATCH, EVERY = 48, int(os.environ.get("EVERY", "25"))

torch.set_num_threads(1)
pixels, labels = map(torch.tensor, load_digits(return_X_y=True))


def build(mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model and the optimizer of this rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)  # each rank of the job holds a shard
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def batch_of(step: int) -> torch.Tensor:
    """Return the samples of all ranks in a step."""
    epoch, position = divmod(step, len(labels) // BATCH)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))  # equal in all ranks
    return order[position * BATCH : (position + 1) * BATCH]


distributed.init_process_group("gloo")
rank, ranks = distributed.get_rank(), distributed.get_world_size()
model, optimizer = build(init_device_mesh("cpu", (ranks,)))
for step in range(int(os.environ.get("STEPS", "300"))):
    mine = batch_of(step)[rank * BATCH // ranks : (rank + 1) * BATCH // ranks]
    loss = nn.functional.cross_entropy(model(pixels[mine].float()), labels[mine])
    loss.backward()  # type: ignore[no-untyped-call]  # averages over all ranks
    optimizer.step()
    optimizer.zero_grad()
    if (step + 1) % EVERY == 0:
        print(f"rank {rank} of {ranks} step {step + 1} loss {loss.item():.3f}", flush=True)

parameters: list[Any] = list(model.parameters())
shard = hashlib.sha256(b"".join(one.to_local().numpy(force=True).tobytes() for one in parameters))
print(f"rank {rank} of {ranks} step {step + 1} shard {shard.hexdigest()[:16]}", flush=True)
distributed.destroy_process_group()
