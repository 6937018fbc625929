"""Learn digits in one process: python examples/train_epochs_plain.py. docs/epochs.md converts it to train_epochs.py."""

import os
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, SAVED = int(os.environ.get("EPOCHS", "8")), Path(os.environ.get("SAVED", "saved-plain"))

pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
data, test = TensorDataset(pixels[:1500].float(), labels[:1500]), (pixels[1500:].float(), labels[1500:])
loader = DataLoader(data, batch_size=96, shuffle=True, num_workers=2)

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
first = 0
if (SAVED / "last.pt").exists():
    saved = torch.load(SAVED / "last.pt")
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    best, first = saved["best"], saved["epoch"]

for epoch in range(first, EPOCHS):
    model.train()
    for x, y in loader:
        adamw.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        adamw.step()
    scheduler.step()
    accuracy = evaluate()
    print(f"epoch {epoch + 1} lr {scheduler.get_last_lr()[0]:g} accuracy {accuracy:.4f}", flush=True)
    if accuracy > best["accuracy"]:
        best["accuracy"] = accuracy
        save("best.pt", model.state_dict())
    state = {name: part.state_dict() for name, part in parts.items()}
    save("last.pt", {**state, "best": best, "epoch": epoch + 1})
