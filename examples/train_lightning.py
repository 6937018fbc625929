"""Learn digits with Lightning on fault-tolerant groups: keepstep run --replicas 3 -- examples/train_lightning.py

First: pip install lightning
"""

import os
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import keepstep.integrations.lightning  # registers strategy="keepstep"  # noqa: F401

EPOCHS = int(os.environ.get("EPOCHS", "12"))
folder = os.environ.get("CHECKPOINTS", "lightning-checkpoints")  # a folder that all groups share

pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
training, test = (
    TensorDataset(pixels[:1500].float(), labels[:1500]),
    TensorDataset(pixels[1500:].float(), labels[1500:]),
)


class Digits(pl.LightningModule):
    """A small network that reads handwritten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 10))

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _number: int) -> torch.Tensor:
        """Return the loss of a batch."""
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], _number: int) -> None:
        """Log the loss of a batch. All groups evaluate all samples, with equal weights."""
        self.log("val_loss", nn.functional.cross_entropy(self.layers(batch[0]), batch[1]))

    def on_validation_epoch_end(self) -> None:
        """Print the loss of all samples."""
        if not self.trainer.sanity_checking:
            loss = self.trainer.callback_metrics["val_loss"]
            print(f"epoch {self.current_epoch} step {self.global_step} val_loss {loss:.6f}", flush=True)

    def configure_optimizers(self) -> dict[str, object]:
        """Return the optimizer, and a schedule over all steps."""
        adamw = torch.optim.AdamW(self.parameters())
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(adamw, max_lr=1e-2, total_steps=steps)
        return {"optimizer": adamw, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


model = Digits()
trainer = pl.Trainer(
    strategy="keepstep",
    devices=1,
    max_epochs=EPOCHS,
    gradient_clip_val=1.0,
    callbacks=[
        EarlyStopping("val_loss", patience=5),
        ModelCheckpoint(folder, "{step}", "val_loss", save_top_k=2, enable_version_counter=False),  # one group writes
    ],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(
    model,
    DataLoader(training, batch_size=25, shuffle=True),
    DataLoader(test, batch_size=100),
    ckpt_path=os.environ.get("RESUME"),  # the same file in all groups
)
best = Path(trainer.checkpoint_callback.best_model_path).name
print(f"ended at step {trainer.global_step} of epoch {trainer.current_epoch}, best {best}", flush=True)
