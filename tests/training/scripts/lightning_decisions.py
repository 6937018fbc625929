"""FSDP2 in Lightning over the ranks of each group. Rank 1 of group 1 alone wants to stop, in its fifth step.

WISH=early_stopping: by a metric that EarlyStopping monitors; WISH=should_stop: by a callback. Each rank prints the end
of its sanity check, with the step of its Manager, and the step at which it has ended.
"""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader, TensorDataset

from keepstep.integrations.lightning import KeepstepModelParallelStrategy

RANKS = int(os.environ["WORLD_SIZE"])
WISHES = (os.environ["REPLICA_GROUP_ID"], os.environ["RANK"]) == ("1", "1")
STOP = 5


class Line(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def configure_model(self) -> None:
        if not isinstance(self.layer, FSDPModule):
            fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: list[torch.Tensor], _number: int) -> torch.Tensor:
        return self.layer(batch[0]).square().mean()

    def validation_step(self, _batch: list[torch.Tensor], _number: int) -> None:
        self.log("wish", float(WISHES and self.global_step >= STOP))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


class Notes(pl.Callback):
    """Prints what the test reads."""

    def on_sanity_check_end(self, trainer: Any, *_: Any) -> None:
        manager = trainer.strategy.manager
        print(f"sanity check ends at step {manager.current_step()}, in step {manager.steps.open_number}", flush=True)


class Wish(pl.Callback):
    """Sets ``should_stop`` as docs/lightning.md does."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.strategy.committed:
            wish = WISHES and trainer.global_step >= STOP
            trainer.should_stop = trainer.strategy.reduce_boolean_decision(wish, all=False)


early = EarlyStopping("wish", patience=10**6, mode="max", stopping_threshold=0.5, check_on_train_epoch_end=False)
model = Line()
data = DataLoader(TensorDataset(torch.ones(64, 4)), batch_size=4)
trainer = pl.Trainer(
    strategy=KeepstepModelParallelStrategy(data_parallel_size=RANKS, tensor_parallel_size=1), accelerator="cpu",
    devices=RANKS, max_steps=200, max_epochs=-1, val_check_interval=1, num_sanity_val_steps=1, logger=False,
    callbacks=[Notes(), early if os.environ["WISH"] == "early_stopping" else Wish()], enable_checkpointing=False,
    enable_progress_bar=False, enable_model_summary=False,
)  # fmt: skip
trainer.fit(model, data, data)
print(f"ended at step {trainer.global_step}", flush=True)
