#!/usr/bin/env bash
# Guess: a fit that resumes after BackboneFinetuning has unfrozen the backbone trains the backbone on: the checkpoint
#   has the state of the callback, with the groups of parameters of the optimizer.
# Seen: each fit freezes the backbone at its begin, and a resume restores the groups only. The callback unfreezes in the
#   very epoch that it was given, which is over. The backbone stays as it was at the resume, while its learning rate is
#   logged, and goes on growing.
# Version: lightning 2.6.6 with torch 2.13.0, BaseFinetuning and BackboneFinetuning.
# Why it matters: a job that is preempted after that epoch ends as a fine-tuned head on a backbone of the checkpoint.
#   The loss goes on falling. Set requires_grad in on_train_start yourself.
# keepstep: a group that heals trains what the others train; a resume does as Lightning
#   (tests/training/scripts/test_lightning.py).
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6 scikit-learn==1.9.1 lightning==2.6.6
program <<'PYTHON'
import logging

import lightning.pytorch as pl
import torch
from finding import compare, show_versions
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

show_versions("lightning", "torch")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
data = TensorDataset(pixels.float(), labels)


class Digits(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone, self.head = nn.Linear(64, 32), nn.Linear(32, 10)
        self.trained = {}

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self.head(self.backbone(batch[0]).relu()), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD([one for one in self.parameters() if one.requires_grad], lr=0.01)

    def on_train_epoch_start(self):
        self.before = self.backbone.weight.detach().clone()

    def on_train_epoch_end(self):
        self.trained[self.current_epoch] = not torch.equal(self.before, self.backbone.weight)


def fit(epochs, folder, **resume):
    """Return in which epochs the backbone was trained, which is unfrozen in epoch 2."""
    model = Digits()
    finetuning = BackboneFinetuning(unfreeze_backbone_at_epoch=2, backbone_initial_lr=0.01, lambda_func=lambda _: 1.0)
    trainer = pl.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[finetuning, ModelCheckpoint(folder, save_last=True)],
    )
    trainer.fit(model, DataLoader(data, batch_size=128), **resume)
    return model.trained


whole = fit(6, "whole")
fit(4, "first")
resumed = fit(6, "first", ckpt_path="first/last.ckpt", weights_only=False)
for words, trained, known in (("whole run", whole, True), ("resumed at epoch 4", resumed, False)):
    seen = [trained[4], trained[5]]
    compare(f"backbone trained in epochs 4 and 5, {words}", guess=2 * [True], seen=seen, known=2 * [known])
PYTHON
