"""Resume by itself after the loss of all groups: keepstep up, keepstep run --replicas 2 -- examples/durable.py"""

import hashlib
import os

import torch
from sklearn.datasets import load_digits
from torch import nn

from keepstep import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

STEPS, EVERY, BATCH = int(os.environ.get("STEPS", "300")), int(os.environ.get("EVERY", "10")), 32

torch.manual_seed(0)
pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
adamw = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": adamw}
manager = Manager(
    pg=ProcessGroupGloo(),
    state_dict=lambda: {name: part.state_dict() for name, part in state.items()},
    load_state_dict=lambda saved: [part.load_state_dict(saved[name]) for name, part in state.items()],
    min_replica_size=int(os.environ.get("NUM_REPLICA_GROUPS", "1")),  # equal numbers in every run: all take part
    durable_every=EVERY,
)
ddp = DistributedDataParallel(manager, model)
optimizer = Optimizer(manager, adamw)


def next_batch() -> tuple[int, torch.Tensor]:
    """Return the number and the samples of the batch that this group trains on in this step."""
    number = manager.batches_committed() + (manager.participating_rank() or 0)
    epoch, position = divmod(number, len(labels) // BATCH)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))  # equal in all groups
    return number, order[position * BATCH : (position + 1) * BATCH]


if manager.resume():  # if all groups were lost; else it does nothing
    print(f"resumed at step {manager.current_step()}", flush=True)
while manager.current_step() < STEPS:
    optimizer.zero_grad()
    number, batch = next_batch()
    loss = nn.functional.cross_entropy(ddp(pixels[batch].float()), labels[batch])
    loss.backward()
    if optimizer.step():
        print(f"step {manager.current_step()} batch {number} loss {loss.item()!r}", flush=True)

manager.finish()  # wait until all groups have the final weights
weights = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values()))
print(f"step {manager.current_step()} weights {weights.hexdigest()[:16]}", flush=True)
