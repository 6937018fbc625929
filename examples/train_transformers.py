"""Train a small GPT-2 on text with a Trainer: keepstep run --replicas 3 -- examples/train_transformers.py

First: pip install transformers accelerate
"""

import os
from pathlib import Path
from pydoc_data.topics import topics  # the text of Python's help("topics")

import torch
from torch.utils.data import Dataset

from keepstep.integrations.transformers import KeepstepTrainer  # before TrainingArguments  # isort: skip
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

STEPS, LENGTH = int(os.environ.get("STEPS", "120")), 64
text = torch.frombuffer(bytearray("\n".join(topics.values()), "utf-8"), dtype=torch.uint8)  # a byte is a token
windows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Windows of the text."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows.long()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class PrintLoss(TrainerCallback):
    """Prints the loss of all samples of the test set, which all groups evaluate with equal weights."""

    def on_evaluate(self, _args: object, state: object, _control: object, metrics: dict, **_others: object) -> None:
        """Print it."""
        print(f"step {state.global_step} eval_loss {metrics['eval_loss']:.6f}", flush=True)


model = GPT2LMHeadModel(
    GPT2Config(vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
)
model.loss_type = "ForCausalLM"  # the default, of which Transformers would warn
arguments = TrainingArguments(
    output_dir=os.environ.get("CHECKPOINTS", "trainer-checkpoints"),  # a folder that all groups share: one group writes
    max_steps=STEPS,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=3e-3,
    lr_scheduler_type="cosine",
    warmup_steps=10,
    eval_strategy="steps",
    eval_steps=20,
    save_strategy="steps",
    save_steps=20,
    save_total_limit=2,
    load_best_model_at_end=True,
    metric_for_best_model="loss",
    logging_steps=10,
    report_to="none",
    disable_tqdm=True,
    use_cpu=not torch.cuda.is_available(),
)
trainer = KeepstepTrainer(
    model=model,
    args=arguments,
    train_dataset=Windows(windows[64:]),
    eval_dataset=Windows(windows[:64]),
    callbacks=[EarlyStoppingCallback(early_stopping_patience=3), PrintLoss()],
)
trainer.train(resume_from_checkpoint="RESUME" in os.environ)
best = Path(trainer.state.best_model_checkpoint or "none").name
print(f"ended at step {trainer.state.global_step}, best {best}", flush=True)
