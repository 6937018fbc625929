"""A small language model that resumes: CHECKPOINTS=saved keepstep run --replicas 2 -- examples/train_lm.py"""

import contextlib
import math
import os
from pathlib import Path

import torch
from torch import Tensor, nn

from keepstep import DistributedDataParallel, ElasticSampler, Manager, Optimizer, ProcessGroupGloo

STEPS, WARMUP, SAVE_EVERY = int(os.environ.get("STEPS", "300")), 20, 25
CONTEXT, WIDTH, SAMPLES, MICRO_BATCHES = 64, 64, 64, 2  # samples of all groups together, whatever their number
folder = Path(os.environ.get("CHECKPOINTS", "checkpoints"))  # a folder that all groups share
device = "cuda" if torch.cuda.is_available() else "cpu"

text = b"".join(path.read_bytes() for path in sorted(Path(os.__file__).parent.glob("*.py")))  # Python's library
windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, CONTEXT + 1, CONTEXT)  # a token is a byte


class LanguageModel(nn.Module):
    """Predicts the next byte after each byte of (batch, time); returns logits (batch, time, 256)."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        future = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        return self.head(self.layers(self.tokens(tokens) + self.positions.weight, mask=future, is_causal=True))


def schedule(step: int) -> float:
    """Return the share of the learning rate: a linear warm-up, then a cosine down to a tenth."""
    return min(1, (step + 1) / WARMUP) * (0.55 + 0.45 * math.cos(math.pi * min(1, step / STEPS)))


model = LanguageModel().to(device)
adamw = torch.optim.AdamW(model.parameters(), lr=3e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(adamw, schedule)
state = {"model": model, "optimizer": adamw, "scheduler": scheduler}
manager = Manager(
    pg=ProcessGroupGloo(),  # ProcessGroupNCCL() if each group has GPUs of its own
    state_dict=lambda: {name: part.state_dict() for name, part in state.items()},
    load_state_dict=lambda saved: [part.load_state_dict(saved[name]) for name, part in state.items()],
)
ddp = DistributedDataParallel(manager, model)
optimizer = Optimizer(manager, adamw)
sampler = ElasticSampler(len(windows), manager, global_batch_size=SAMPLES)  # heals with the rest of the state
durable = {**state, "manager": manager, "sampler": sampler}
if saved := sorted(folder.glob("step-*.pt")):
    for name, part in torch.load(saved[-1], map_location=device).items():
        durable[name].load_state_dict(part)
    print(f"resumed after step {manager.current_step()}, at sample {sampler.sample}", flush=True)

while manager.current_step() < STEPS:
    indices = next(iter(sampler))  # begin the step, and wait for its groups: each sample is trained on once
    optimizer.zero_grad()
    parts = windows[indices].to(device, torch.long).chunk(MICRO_BATCHES)
    for count, part in enumerate(parts, start=1):
        with contextlib.nullcontext() if count == len(parts) else ddp.no_sync():  # the last one averages over groups
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(ddp(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten())
            (loss * sampler.weight * len(part) / len(indices)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    if optimizer.step():  # commit: True in all groups, or the step is repeated
        scheduler.step()
        print(f"step {manager.current_step()} loss {loss.item():.3f}", flush=True)
        if manager.current_step() % SAVE_EVERY == 0 and manager.participating_rank() == 0:  # one group saves
            path = folder / f"step-{manager.current_step():09}.pt"
            folder.mkdir(parents=True, exist_ok=True)
            torch.save({name: part.state_dict() for name, part in durable.items()}, path.with_suffix(".part"))
            path.with_suffix(".part").rename(path)  # a reader sees all of the file or nothing
manager.finish()  # wait until all groups have the final weights
