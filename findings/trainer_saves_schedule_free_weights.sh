#!/usr/bin/env bash
# Guess: with optim="schedule_free_adamw" a Trainer saves the averaged weights, those that the method is for and that
#   its evaluations measure; or always those of the training.
# Seen: it saves what the model holds at that moment: the averaged weights if an evaluation came since the last training
#   step, and the training's if not. The same training has other checkpoints, and another final model, if only
#   eval_strategy differs.
# Version: transformers 5.24.0 and accelerate 1.15.0 with schedulefree 1.4.1 and torch 2.13.0.
# Why it matters: save_steps that are no multiple of eval_steps, and save_model() after a training without evaluation,
#   give weights whose loss was never measured. trainer.optimizer.eval() before the save gives the averaged ones.
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6 accelerate==1.15.0 transformers==5.24.0 schedulefree==1.4.1
program <<'PYTHON'
import os

os.environ["ACCELERATE_USE_CPU"] = "1"

import tempfile

import torch
import transformers
from finding import compare, show_versions
from safetensors.torch import load_file
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

show_versions("transformers", "accelerate", "schedulefree", "torch")
transformers.logging.set_verbosity_error()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def forward(self, labels):
        return {"loss": (self.weight - labels).square().mean()}


def saved_weights(evaluation):
    """Return the saved weight at each fourth step, the final one, and the averaged weight that the optimizer has."""
    folder = tempfile.mkdtemp(dir=".")
    arguments = TrainingArguments(
        folder,
        optim="schedule_free_adamw",
        lr_scheduler_type="constant",
        learning_rate=0.1,
        max_steps=8,
        save_steps=4,
        report_to=[],
        disable_tqdm=True,
        **evaluation,
    )
    samples = [{"labels": 3.0}] * 8
    trainer = Trainer(Model(), arguments, train_dataset=samples, eval_dataset=samples)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    weights = [load_file(f"{folder}/checkpoint-{step}/model.safetensors")["weight"] for step in (4, 8)]
    weights.append(trainer.model.weight.detach().clone())
    trainer.optimizer.eval()
    return [round(weight.item(), 3) for weight in (*weights, trainer.model.weight)]


for words, evaluation, known in (
    ("an evaluation each 4 steps", {"eval_strategy": "steps", "eval_steps": 4}, [0.25, 0.45, 0.45, 0.45]),
    ("an evaluation each 3 steps", {"eval_strategy": "steps", "eval_steps": 3}, [0.265, 0.45, 0.45, 0.45]),
    ("no evaluation", {"eval_strategy": "no"}, [0.265, 0.485, 0.485, 0.45]),
):
    compare(
        f"saved weight after steps 4 and 8, final weight, averaged weight; {words}",
        guess=[0.25, 0.45, 0.45, 0.45],
        seen=saved_weights(evaluation),
        known=known,
    )
PYTHON
