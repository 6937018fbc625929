"""Shard a model of Lightning over the ranks of each group: keepstep run --replicas 2 --nproc-per-replica 2 -- SCRIPT"""

import os
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from keepstep.integrations.lightning import KeepstepModelParallelStrategy

RANKS = int(os.environ["WORLD_SIZE"])  # of a group
folder = os.environ.get("CHECKPOINTS", "lightning-checkpoints")  # a folder that all groups share

pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
samples = TensorDataset(pixels.float(), labels)
training, test = torch.utils.data.Subset(samples, range(1500)), torch.utils.data.Subset(samples, range(1500, 1797))


class Digits(pl.LightningModule):
    """A small network that reads handwritten digits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.ReLU(), nn.Linear(64, 10))

    def configure_model(self) -> None:
        """Shard the layers over the ranks of this group. Lightning calls it before each fit and evaluation."""
        mesh = self.device_mesh["data_parallel"]
        for part in (self.layers[0], self.layers):
            if not isinstance(part, torch.distributed.fsdp.FSDPModule):
                fully_shard(part, mesh=mesh)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], _number: int) -> torch.Tensor:
        """Return the loss of a batch."""
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def validation_step(self, batch: tuple[torch.Tensor, torch.Tensor], _number: int) -> None:
        """Log the loss of a batch, averaged over the ranks of this group. All groups evaluate all samples."""
        self.log("val_loss", nn.functional.cross_entropy(self.layers(batch[0]), batch[1]), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        """Print the loss of all samples."""
        if self.trainer.is_global_zero and not self.trainer.sanity_checking:
            loss = self.trainer.callback_metrics["val_loss"]
            print(f"epoch {self.current_epoch} step {self.global_step} val_loss {loss:.6f}", flush=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


pl.seed_everything(0)  # every rank makes the same weights, and keeps its shard of them
model = Digits()
trainer = pl.Trainer(
    strategy=KeepstepModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1),
    devices=RANKS,
    max_epochs=int(os.environ.get("EPOCHS", "12")),
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
    ckpt_path=os.environ.get("RESUME"),  # the same folder in all groups
)
best = Path(trainer.checkpoint_callback.best_model_path).name
print(f"ended at step {trainer.global_step} of epoch {trainer.current_epoch}, best {best}", flush=True)
