"""Learn digits for some epochs, on groups that may die: keepstep run --replicas 2 -- examples/train_epochs.py"""

import os
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from keepstep import DistributedDataParallel, ElasticLoader, ElasticSampler, Manager, Optimizer, ProcessGroupGloo

EPOCHS, SAVED = int(os.environ.get("EPOCHS", "8")), Path(os.environ.get("SAVED", "saved"))

pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
data, test = TensorDataset(pixels[:1500].float(), labels[:1500]), (pixels[1500:].float(), labels[1500:])

model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 10))
adamw = torch.optim.AdamW(model.parameters(), lr=2e-3)
scheduler = torch.optim.lr_scheduler.StepLR(adamw, step_size=2, gamma=0.5)
best = {"accuracy": 0.0}


def evaluate() -> float:
    model.eval()
    with torch.no_grad():
        return (model(test[0]).argmax(1) == test[1]).float().mean().item()


def save(name: str, content: object) -> None:
    SAVED.mkdir(parents=True, exist_ok=True)
    torch.save(content, SAVED / f"{name}.part")
    (SAVED / f"{name}.part").rename(SAVED / name)


parts = {"model": model, "optimizer": adamw, "scheduler": scheduler}


def state_dict() -> dict[str, object]:
    return {**{name: part.state_dict() for name, part in parts.items()}, "best": dict(best)}


def load_state_dict(saved: dict[str, object]) -> None:
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    best.update(saved["best"])


manager = Manager(pg=ProcessGroupGloo(), state_dict=state_dict, load_state_dict=load_state_dict)
ddp = DistributedDataParallel(manager, model)
optimizer = Optimizer(manager, adamw)
sampler = ElasticSampler(len(data), manager, global_batch_size=96)
loader = ElasticLoader(data, sampler, num_workers=2)

if (SAVED / "last.pt").exists():  # the same file in all groups
    saved = torch.load(SAVED / "last.pt")
    manager.load_state_dict(saved["manager"])
    sampler.load_state_dict(saved["sampler"])
    load_state_dict(saved)

for _ in sampler.epochs(EPOCHS):
    model.train()
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(ddp(x), y)
        (loss * sampler.weight).backward()
        optimizer.step()
    scheduler.step()
    accuracy = evaluate()
    print(f"epoch {sampler.epoch} lr {scheduler.get_last_lr()[0]:g} accuracy {accuracy:.4f}", flush=True)
    improved = accuracy > best["accuracy"]
    best["accuracy"] = max(accuracy, best["accuracy"])
    if manager.participating_rank() == 0:  # one group writes
        if improved:
            save("best.pt", model.state_dict())
        save("last.pt", {**state_dict(), "manager": manager.state_dict(), "sampler": sampler.state_dict()})

manager.finish()
