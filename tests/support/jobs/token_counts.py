"""A Trainer whose two processes have 15 and 2 tokens in a step: of plain Transformers, or a group of keepstep.

It saves the weights after the last step to the file of its first argument. ``plain``: the second one, for torchrun.
Environment variables:

OPTIONS      JSON: more arguments of the Trainer
SAMPLES      of both processes together; default: 12
LOSS_SCALE   of a GradScaler on the CPU, where Accelerate makes none for fp16
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch

PLAIN = "plain" in sys.argv
if not PLAIN:
    import keepstep.integrations.transformers as groups  # before TrainingArguments
import accelerate  # noqa: E402
import transformers  # noqa: E402

VOCABULARY = 17


def scale_on_cpu(scale: float) -> None:
    """Let each Accelerator use float16 with a GradScaler on the CPU too."""
    original = accelerate.Accelerator.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.native_amp, self.scaler = True, torch.amp.GradScaler("cpu", init_scale=scale)

    accelerate.Accelerator.__init__ = init


def main() -> None:
    if "LOSS_SCALE" in os.environ:
        scale_on_cpu(float(os.environ["LOSS_SCALE"]))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=8, n_layer=1, n_head=2, n_inner=16,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    data = []
    for number in range(int(os.environ.get("SAMPLES", "12"))):
        ids = torch.randint(VOCABULARY, (16,), generator=generator)
        labels = ids.clone()
        labels[: 16 - (15 if number % 2 == 0 else 0 if number == 11 else 2)] = -100
        data.append({"input_ids": ids, "labels": labels})
    args = transformers.TrainingArguments(
        sys.argv[1] + ".out", per_device_train_batch_size=1, gradient_accumulation_steps=2, use_cpu=True,
        report_to="none", disable_tqdm=True, save_strategy="no", train_sampling_strategy="sequential",
        optim="sgd", learning_rate=0.5, lr_scheduler_type="constant",
        **{"max_steps": 3, **json.loads(os.environ.get("OPTIONS", "{}"))},
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    make = transformers.Trainer if PLAIN else groups.KeepstepTrainer
    make(model=model, args=args, train_dataset=data).train()
    torch.save(model.state_dict(), sys.argv[1])


if __name__ == "__main__":
    main()
