#!/usr/bin/env bash
# Guess: with sync_ref_model=True, where the reference model follows the policy, a resume goes on with the reference of
#   the checkpoint, as it does with model, optimizer, schedule and random state.
# Seen: a checkpoint has the policy only. After a resume the reference is the model that the script passed, until the
#   next synchronization moves it by ref_model_mixup_alpha. The rewards and the loss of these steps are relative to the
#   model of before the training, and so is the gradient.
# Version: trl 1.16.0, transformers 5.24.0 and accelerate 1.15.0 with torch 2.13.0, DPOTrainer.
# Why it matters: ref_model_sync_steps is 512 by default, so a job that is preempted often trains most steps against a
#   reference that a run without a break has left long ago. Save and load trainer.ref_model yourself.
# keepstep: KeepstepMixin heals the reference model too; as in trl, a folder of checkpoints has none
#   (tests/unit/keepstep/integrations/test_transformers.py).
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6 accelerate==1.15.0 transformers==5.24.0 datasets==5.2.0 trl==1.16.0
program <<'PYTHON'
import os

os.environ["ACCELERATE_USE_CPU"] = "1"
os.environ["HF_HUB_OFFLINE"] = "1"  # no telemetry

import torch
import transformers
from datasets import Dataset
from finding import compare, show_versions
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, TrainerCallback
from transformers.trainer_callback import PrinterCallback
from trl import DPOConfig, DPOTrainer

show_versions("trl", "transformers", "accelerate", "torch")
transformers.logging.set_verbosity_error()
WORDS = ["[PAD]", "[EOS]", "rain", "snow", "sun", "wind", "fog", "hail"]
words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[PAD]"))
words.pre_tokenizer = Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", eos_token="[EOS]")
rows = [(WORDS[2 + number % 6], WORDS[2 + number % 5], WORDS[2 + number % 4]) for number in range(24)]
data = Dataset.from_list([{"prompt": one, "chosen": f" {good}", "rejected": f" {bad}"} for one, good, bad in rows])
config = Qwen2Config(
    vocab_size=len(WORDS),
    hidden_size=8,
    intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    pad_token_id=0,
    eos_token_id=1,
)
torch.manual_seed(0)
Qwen2ForCausalLM(config).save_pretrained("first")


def weights(model):
    return torch.cat([one.detach().flatten() for one in model.parameters()])


def references(steps, checkpoint=None, **saving):
    """Return the reference model at the beginning of each step."""
    arguments = DPOConfig(
        "out",
        max_steps=steps,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        sync_ref_model=True,
        ref_model_sync_steps=2,
        ref_model_mixup_alpha=1.0,  # the reference becomes the policy
        bf16=False,
        report_to=[],
        disable_tqdm=True,
        **saving,
    )
    found = {}

    class Note(TrainerCallback):
        def on_step_begin(self, args, state, control, **_):
            found[state.global_step] = weights(trainer.ref_model)

    policy, reference = (Qwen2ForCausalLM.from_pretrained("first") for _ in range(2))
    options = {"train_dataset": data, "processing_class": tokenizer, "callbacks": [Note()]}
    trainer = DPOTrainer(policy, reference, arguments, **options)
    trainer.remove_callback(PrinterCallback)
    trainer.train(resume_from_checkpoint=checkpoint)
    return found


whole = references(7, save_strategy="steps", save_steps=5)
resumed = references(7, "out/checkpoint-5", save_strategy="no")
first = weights(Qwen2ForCausalLM.from_pretrained("first"))
names = {"first": first, "of the checkpoint": whole[5]}
seen = [next((name for name in names if torch.equal(names[name], run[5])), None) for run in (whole, resumed)]
compare(
    "reference model after step 5, in the whole run and in the one that resumed there",
    guess=["of the checkpoint", "of the checkpoint"],
    seen=seen,
    known=["of the checkpoint", "first"],
)
PYTHON
