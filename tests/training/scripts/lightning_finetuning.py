"""A LightningModule whose backbone thaws in its second epoch. With STOPS, it prints "thawed" in the third, and stops.

At the end it prints its step, and of its groups of parameters the rates, and whether the backbone trains.
"""

from __future__ import annotations

import os
import time
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from torch.utils.data import DataLoader, TensorDataset

import keepstep.integrations.lightning  # registers strategy="keepstep"  # noqa: F401


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor], _number: int) -> torch.Tensor:
        if self.current_epoch == 2 and os.environ.get("STOPS"):
            print("thawed", flush=True)
            time.sleep(600)  # until it is killed
        return self.head(self.backbone(batch[0]).tanh()).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([one for one in self.parameters() if one.requires_grad], 0.1, momentum=0.9)


pl.seed_everything(0)
data = DataLoader(TensorDataset(torch.randn(32, 4)), batch_size=4)  # four batches a group
model = Net()
trainer = pl.Trainer(
    strategy="keepstep", accelerator="cpu", devices=1, logger=False, max_epochs=4, enable_checkpointing=False,
    callbacks=[BackboneFinetuning(1, lambda _epoch: 1.0, backbone_initial_lr=0.02)], enable_progress_bar=False,
    enable_model_summary=False,
)  # fmt: skip
trainer.fit(model, data)
rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
print(f"ended at {trainer.global_step}: {rates} {model.backbone.weight.requires_grad}", flush=True)
