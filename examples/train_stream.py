"""A small language model on a stream of Hugging Face datasets: keepstep run --replicas 3 -- examples/train_stream.py

First: pip install datasets
"""

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from datasets import IterableDataset
from torch import nn

from keepstep import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from keepstep.integrations.datasets import StreamLoader

EPOCHS, CONTEXT, WIDTH = int(os.environ.get("EPOCHS", "2")), 32, 48
files = [str(path) for path in sorted(Path(os.__file__).parent.glob("a*.py"))]  # of Python's library


def windows(paths: list[str]) -> Iterator[dict[str, list[int]]]:
    """Yield the bytes of all files, each a token."""
    for path in paths:
        text = Path(path).read_bytes()
        for start in range(0, len(text) - CONTEXT, CONTEXT):
            yield {"tokens": list(text[start : start + CONTEXT + 1])}


stream = IterableDataset.from_generator(windows, gen_kwargs={"paths": files})
stream = stream.shuffle(seed=0, buffer_size=500).with_format("torch")  # the files, and the windows in the buffer
length = sum(1 for path in files for _ in windows([path]))

torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(256, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, 256))
adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)


def load(state: dict[str, dict[str, object]]) -> None:
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
loader = StreamLoader(stream, length, manager, global_batch_size=96)

for _ in loader.sampler.epochs(EPOCHS):
    for batch in loader:  # begin the step: the part of its examples that this group takes
        tokens = batch["tokens"]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        (loss * loader.weight).backward()
        if optimizer.step():  # commit: True in all groups, or the examples are divided again
            print(f"step {manager.current_step()} loss {loss.item():.3f}", flush=True)
manager.finish()  # wait until all groups have the final weights
