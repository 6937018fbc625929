#!/usr/bin/env bash
# Guess: router_aux_loss_coef weights the router loss of a mixture of experts alike, however a batch is divided into
#   accumulated ones and over ranks. The Trainer corrects the loss for both, as it counts tokens.
# Seen: the model returns token loss + coefficient * router loss. The token loss is divided by the tokens of the whole
#   step already, so the Trainer divides the sum by nothing, and multiplies it by the number of ranks. The router loss
#   of each accumulated batch is added and not averaged, and that of each rank too: its weight grows by the product.
# Version: transformers 5.24.0 and accelerate 1.15.0 with torch 2.13.0, average_tokens_across_devices=True (default).
# Why it matters: 8 accumulated batches on 8 ranks train with 64 times the coefficient. A job that keeps its batch size
#   and moves to another number of ranks, or to shorter batches for want of memory, trains another objective.
# keepstep: the number of groups does not count, and accumulation does (docs/transformers.md).
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6 accelerate==1.15.0 transformers==5.24.0
program_of_ranks 2 <<'PYTHON'
import os

os.environ["ACCELERATE_USE_CPU"] = "1"

import torch
import transformers
from finding import compare, show_versions
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

show_versions("transformers", "accelerate", "torch")
transformers.logging.set_verbosity_error()
ROW = torch.arange(16)  # all samples are equal, so the router loss of each batch is too


def make(coefficient):
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        output_router_logits=True,
        router_aux_loss_coef=coefficient,
    )
    return MixtralForCausalLM(config)


def router(model):
    (weight,) = [one for name, one in model.named_parameters() if name.endswith("mlp.gate.weight")]
    return weight


def gradient(coefficient, batches):
    """Return the router's gradient in a step of 16 samples: on each rank so many accumulated batches."""
    found = []

    class Note(TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model, **_):
            found.append(router(model).grad.clone())

    arguments = TrainingArguments(
        "out",
        max_steps=1,
        per_device_train_batch_size=8 // batches,
        gradient_accumulation_steps=batches,
        max_grad_norm=0.0,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    data = [{"input_ids": ROW, "labels": ROW}] * 16
    trainer = Trainer(make(coefficient), arguments, train_dataset=data, callbacks=[Note()])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return found[0]


model = make(1.0)
model(input_ids=ROW[None], labels=ROW[None]).aux_loss.backward()
for batches, known in ((1, 2.0), (2, 4.0), (8, 16.0)):
    part = gradient(1.0, batches) - gradient(0.0, batches)
    factor = (part.norm() / router(model).grad.norm()).item()
    compare(
        f"gradient of the router loss over that of one pass, two ranks with {batches} batches of {8 // batches} each",
        guess=1.0,
        seen=round(factor, 2),
        known=known,
    )
PYTHON
