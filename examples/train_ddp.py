"""Learn digits on fault-tolerant groups: keepstep run --replicas 3 -- examples/train_ddp.py --checkpoints saved"""

import argparse
import hashlib
import itertools
import os
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from keepstep import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo

parser = argparse.ArgumentParser()
parser.add_argument("--steps", default="300", help="last step: a number, or a file that contains it and may change")
parser.add_argument("--checkpoints", type=Path, help="folder for a checkpoint every 100 steps, and to resume from")
args = parser.parse_args()
group, groups = int(os.environ.get("REPLICA_GROUP_ID", "0")), int(os.environ.get("NUM_REPLICA_GROUPS", "1"))

pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
data, test = TensorDataset(pixels[:1500].float(), labels[:1500]), (pixels[1500:].float(), labels[1500:])
sampler = DistributedSampler(data, replica_rank=group, num_replica_groups=groups)
epochs = (sampler.set_epoch(epoch) or DataLoader(data, batch_size=64, sampler=sampler) for epoch in itertools.count())

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
adamw = torch.optim.AdamW(model.parameters(), lr=1e-4)
state = {"model": model, "optimizer": adamw}
manager = Manager(
    pg=ProcessGroupGloo(),
    state_dict=lambda: {name: part.state_dict() for name, part in state.items()},
    load_state_dict=lambda saved: [part.load_state_dict(saved[name]) for name, part in state.items()],
)
replicated = DistributedDataParallel(manager, model)
optimizer = Optimizer(manager, adamw)

checkpoint = args.checkpoints and args.checkpoints / f"group-{group}.pt"
if checkpoint and checkpoint.exists():
    for (_, part), saved in zip([*state.items(), ("manager", manager)], torch.load(checkpoint), strict=True):
        part.load_state_dict(saved)

with manager.rehearse():  # the first pass takes longest: no other group waits for it, and nothing of it is left
    optimizer.zero_grad()
    nn.functional.cross_entropy(replicated(data.tensors[0][:64]), labels[:64]).backward()
    optimizer.step()

for x, y in itertools.chain.from_iterable(epochs):
    if manager.current_step() >= int(args.steps if args.steps.isdigit() else Path(args.steps).read_text()):
        break
    optimizer.zero_grad()  # begin the step: ask for a quorum
    loss = nn.functional.cross_entropy(replicated(x), y)
    loss.backward()  # average gradients over the groups of the quorum
    manager.record(loss=loss.item())  # send the loss to the metrics service
    if optimizer.step() and manager.current_step() % 10 == 0:  # commit if every part of the step succeeded
        print(f"step {manager.current_step()} loss {loss.item():.4f}", flush=True)
        if checkpoint and manager.current_step() % 100 == 0:
            checkpoint.parent.mkdir(parents=True, exist_ok=True)
            torch.save([part.state_dict() for part in (*state.values(), manager)], f"{checkpoint}.part")
            Path(f"{checkpoint}.part").rename(checkpoint)  # replace the file at once

manager.finish()  # wait until all groups have the final weights
accuracy = (model(test[0]).argmax(1) == test[1]).float().mean()
weights = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values()))
print(f"step {manager.current_step()} test accuracy {accuracy:.4f} weights {weights.hexdigest()[:16]}", flush=True)
