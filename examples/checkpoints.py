"""Save once, save on SIGTERM, and resume with the next batch: keepstep run --replicas 2 -- examples/checkpoints.py"""

import os
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

from keepstep import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from keepstep_mesh.errors import Drained

STEPS, SAVE_EVERY, KEEP, BATCH = int(os.environ.get("STEPS", "300")), 100, 3, 32
folder = Path(os.environ.get("CHECKPOINTS", "checkpoints"))  # a folder that all groups share
group = os.environ.get("REPLICA_GROUP_ID", "0")

pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
adamw = torch.optim.AdamW(model.parameters())
state = {"model": model, "optimizer": adamw}
manager = Manager(
    pg=ProcessGroupGloo(),
    state_dict=lambda: {name: part.state_dict() for name, part in state.items()},
    load_state_dict=lambda saved: [part.load_state_dict(saved[name]) for name, part in state.items()],
)
ddp = DistributedDataParallel(manager, model)
optimizer = Optimizer(manager, adamw)
parts = {**state, "manager": manager}  # a checkpoint has the Manager's step and number of batches too


def save() -> None:
    """Write the state of this step, unless the group has none yet, or another group has written it."""
    path = folder / f"step-{manager.current_step():09}.pt"
    if manager.current_step() and not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f"{path.name}.of-{group}"
        torch.save({name: part.state_dict() for name, part in parts.items()}, unfinished)
        unfinished.rename(path)  # a reader sees all of the file or nothing
        for old in sorted(folder.glob("step-*.pt"))[:-KEEP]:
            old.unlink(missing_ok=True)


def next_batch() -> tuple[int, torch.Tensor]:
    """Return the number and the samples of the batch that this group trains on in this step."""
    place = manager.participating_rank()  # waits for the quorum; None: this group heals and does not count
    number = manager.batches_committed() + (place or 0)
    epoch, position = divmod(number, len(labels) // BATCH)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(epoch))  # equal in all groups
    return number, order[position * BATCH : (position + 1) * BATCH]


if saved := sorted(folder.glob("step-*.pt")):
    for name, part in torch.load(saved[-1]).items():
        parts[name].load_state_dict(part)
    print(f"resumed at step {manager.current_step()}", flush=True)

try:
    while manager.current_step() < STEPS:
        optimizer.zero_grad()
        number, batch = next_batch()
        nn.functional.cross_entropy(ddp(pixels[batch].float()), labels[batch]).backward()
        if optimizer.step():
            if manager.is_participating():
                print(f"step {manager.current_step()} batch {number}", flush=True)
            if manager.current_step() % SAVE_EVERY == 0 and manager.participating_rank() == 0:  # one group writes
                save()
except Drained:  # SIGTERM or `keepstep drain`: the step is finished, and the others no longer wait for this group
    save()
    raise
manager.finish()  # wait until all groups have the final weights
