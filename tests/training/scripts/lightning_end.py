"""A LightningModule whose schedule has exactly as many steps as the training. With STOPS, it stops before the last one.

It prints "last step" there, and at the end its step, and the position and rates of its two schedules.
"""

from __future__ import annotations

import os
import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset

import keepstep.integrations.lightning  # registers strategy="keepstep"  # noqa: F401

STEPS = 8


class Line(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: list[torch.Tensor], _number: int) -> torch.Tensor:
        if self.global_step == STEPS - 1 and os.environ.get("STOPS"):
            print("last step", flush=True)
            time.sleep(600)  # until it is killed
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        sgd = torch.optim.SGD(self.parameters(), 0.1)
        interval = os.environ["INTERVAL"]
        total = STEPS if interval == "step" else 2
        schedule = torch.optim.lr_scheduler.OneCycleLR(sgd, max_lr=0.1, total_steps=total)
        return {"optimizer": sgd, "lr_scheduler": {"scheduler": schedule, "interval": interval}}


data = DataLoader(TensorDataset(torch.ones(32, 1)), batch_size=4)  # four batches a group
model = Line()
trainer = pl.Trainer(
    strategy="keepstep", accelerator="cpu", devices=1, logger=False, max_epochs=2, enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(model, data)
schedule = trainer.lr_scheduler_configs[0].scheduler
print(f"ended at {trainer.global_step}: {schedule.last_epoch} {schedule.get_last_lr()}", flush=True)
