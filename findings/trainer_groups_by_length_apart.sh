#!/usr/bin/env bash
# Guess: the ranks of a Trainer divide each epoch among them, in any order that an argument selects.
# Seen: the default sampler does, but that of train_sampling_strategy="group_by_length" shuffles with the random
#   generator of its process. If one rank has drawn random numbers that the other has not, they cut different orders
#   into halves: some samples are trained on both ranks and others on none, here 4 of 20 after one number more.
# Version: transformers 5.24.0 and accelerate 1.15.0 with torch 2.13.0.
# Why it matters: ranks draw apart easily: an augmentation, dropout on batches of different length, a print of a sample
#   on rank 0. The epoch is then a sample with replacement, and its length and loss look right.
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6 accelerate==1.15.0 transformers==5.24.0
program_of_ranks 2 <<'PYTHON'
import os

os.environ["ACCELERATE_USE_CPU"] = "1"

import torch
import torch.distributed as dist
import transformers
from finding import compare, of_all_ranks, show_versions
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback

show_versions("transformers", "accelerate", "torch")
transformers.logging.set_verbosity_error()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.samples = []

    def forward(self, input_ids, labels):
        self.samples += labels.tolist()
        return {"loss": self.weight.sum()}


def collate(samples):
    longest = max(len(sample["input_ids"]) for sample in samples)
    rows = [sample["input_ids"] + [0] * (longest - len(sample["input_ids"])) for sample in samples]
    return {"input_ids": torch.tensor(rows), "labels": torch.tensor([sample["labels"] for sample in samples])}


def trained(strategy):
    """Return how many of 20 samples some rank trained in one epoch; rank 1 has drawn a random number more."""
    model = Model()
    arguments = TrainingArguments(
        output_dir="out",
        num_train_epochs=1,
        per_device_train_batch_size=2,
        train_sampling_strategy=strategy,
        remove_unused_columns=False,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    data = [{"input_ids": [1] * (2 + index % 3), "labels": index} for index in range(20)]
    trainer = Trainer(model=model, args=arguments, train_dataset=data, data_collator=collate)
    trainer.remove_callback(PrinterCallback)
    if dist.get_rank() == 1:
        torch.rand(1)
    trainer.train()
    return len(set(sum(of_all_ranks(model.samples), [])))


for strategy, known in (("random", 20), ("group_by_length", 16)):
    subject = f"different samples of an epoch of 20 on two ranks, {strategy}"
    compare(subject, guess=20, seen=trained(strategy), known=known)
PYTHON
