#!/usr/bin/env bash
# Guess: what the optimizer of a SentenceTransformerTrainer trains is equal on all ranks under torchrun, and a resume
#   from a checkpoint goes on with it.
# Seen: the model is. The parameters of a loss, such as the classifier of SoftmaxLoss, are in the optimizer and not in
#   the model, which alone is wrapped for the ranks and saved. Each rank trains a classifier of its own with its own
#   samples, and after a resume a new random one meets the old state of the optimizer.
# Version: sentence-transformers 6.2.0, transformers 5.24.0 and accelerate 1.15.0 with torch 2.13.0.
# Why it matters: the gradients of the model are those of as many different losses as ranks, and a job that is preempted
#   trains its model against a random classifier after each resume. No number that is logged names it.
# keepstep: a Trainer whose optimizer has parameters outside of the model is refused
#   (tests/unit/keepstep/integrations/test_transformers.py).
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6 accelerate==1.15.0 transformers==5.24.0 datasets==5.2.0 sentence-transformers==6.2.0
program_of_ranks 2 <<'PYTHON'
import os

os.environ["ACCELERATE_USE_CPU"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"  # no telemetry

import torch
import torch.distributed as dist
import transformers
from datasets import Dataset
from finding import compare, of_all_ranks, show_versions
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.losses import SoftmaxLoss
from sentence_transformers.models import StaticEmbedding
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers.trainer_callback import PrinterCallback

show_versions("sentence-transformers", "transformers", "accelerate", "torch")
transformers.logging.set_verbosity_error()
WORDS = ["rain", "snow", "sun", "wind", "fog", "hail"]
tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(["?", *WORDS])}, unk_token="?"))
tokenizer.pre_tokenizer = Whitespace()
pairs = [(one, other) for one in WORDS for other in WORDS]
data = Dataset.from_list(
    [{"first": one, "second": other, "label": number % 3} for number, (one, other) in enumerate(pairs)]
)


def trained(steps, checkpoint=None, **saving):
    """Return the weights of the model and of the classifier after so many steps."""
    torch.manual_seed(steps)  # the same on both ranks
    model = SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=4)], device="cpu")
    loss = SoftmaxLoss(model, embedding_dimension=4, num_labels=3)
    arguments = SentenceTransformerTrainingArguments(
        "out",
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        report_to=[],
        disable_tqdm=True,
        **saving,
    )
    trainer = SentenceTransformerTrainer(model=model, args=arguments, train_dataset=data, loss=loss)
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=checkpoint)
    return [torch.cat([one.detach().flatten() for one in part.parameters()]) for part in (model, loss.classifier)]


first = trained(4, save_strategy="steps", save_steps=4)
for part, weights, known in zip(("model", "classifier of the loss"), first, (True, False), strict=True):
    both = of_all_ranks(weights)
    compare(f"equal weights on both ranks, {part}", guess=True, seen=torch.equal(*both), known=known)
resumed = trained(5, "out/checkpoint-4", save_strategy="no")  # one step of 0.1 at most with Adam
for part, before, after, known in zip(("model", "classifier of the loss"), first, resumed, (True, False), strict=True):
    near = bool((before - after).abs().max() <= 0.11)
    compare(f"after the first step of a resume the {part} is a step of Adam away", guess=True, seen=near, known=known)
PYTHON
