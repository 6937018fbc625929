"""Learn digits from a Grain dataset on fault-tolerant groups: keepstep run --replicas 3 -- examples/train_grain.py

First: pip install grain
"""

import os

import grain
import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

from keepstep import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from keepstep.integrations.grain import ElasticIterator

EPOCHS = int(os.environ.get("EPOCHS", "12"))

pixels, labels = load_digits(return_X_y=True)
digits = grain.MapDataset.source(list(zip(pixels.astype(np.float32), labels, strict=True)))
digits = digits.shuffle(seed=0).map(lambda digit: (digit[0] / 16, digit[1])).repeat(EPOCHS)  # another order in each

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)


def load(state: dict[str, dict[str, Tensor]]) -> None:
    """Load the state of a healthy group."""
    model.load_state_dict(state["model"])
    adamw.load_state_dict(state["optim"])


manager = Manager(
    pg=ProcessGroupGloo(),
    state_dict=lambda: {"model": model.state_dict(), "optim": adamw.state_dict()},
    load_state_dict=load,
)
ddp = DistributedDataParallel(manager, model)
optimizer = Optimizer(manager, adamw)
batches = ElasticIterator(digits, manager, global_batch_size=60)  # elements in a step of all groups

for images, numbers in batches:  # begin the step: the part of its elements that this group takes
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(ddp(images), numbers)
    (loss * batches.weight).backward()
    if optimizer.step():  # commit: True in all groups, or the elements are divided again
        print(f"step {manager.current_step()} loss {loss.item():.3f} next {batches.get_state()}", flush=True)
manager.finish()  # wait until all groups have the final weights
