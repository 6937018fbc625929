"""Train a tiny Llama that the ranks of each group share, on samples with different numbers of tokens, without dropout.

Environment variables:

ACCUMULATE number of batches in a step; default: 2
PLAIN      the Trainer of Transformers alone, without keepstep
LOSS_SCALE first scale of a GradScaler for fp16, which Accelerate makes on GPUs only; default: float32
MODEL      folder of a saved model, which ``DISTRIBUTED`` shards; default: FSDP2 by Accelerate
OUTPUT     folder of the checkpoints
STOP       number of the step after which the training stops, of 8
RESUME     resume from the newest checkpoint
WEIGHTS    file in which rank 0 saves all weights
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch

if "PLAIN" not in os.environ:
    import keepstep.integrations.transformers as groups  # before TrainingArguments
from accelerate import Accelerator, DistributedType
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

torch.set_num_threads(1)
RANDOM = torch.Generator().manual_seed(0)
ROWS = []
for number, row in enumerate(torch.randint(1, 64, (256, 16), generator=RANDOM)):
    labels = row.clone()
    labels[: number % 9] = -100
    ROWS.append({"input_ids": row, "labels": labels})
STOP = int(os.environ.get("STOP", "8"))


if "LOSS_SCALE" in os.environ:

    def init(self: Any, *args: Any, original: Any = Accelerator.__init__, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.native_amp = True
        self.scaler = torch.amp.GradScaler("cpu", init_scale=float(os.environ["LOSS_SCALE"]))

    Accelerator.__init__ = init


class Stop(TrainerCallback):
    """Stops after a step, and prints the steps that overflowed and the loss of the test set."""

    def on_step_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop |= state.global_step == STOP
        if trainer.accelerator.optimizer_step_was_skipped:
            print("overflow in step", state.global_step, flush=True)

    def on_evaluate(self, _args: Any, state: Any, _control: Any, metrics: dict[str, float], **_: Any) -> None:
        print(json.dumps({"step": state.global_step, "eval_loss": metrics["eval_loss"]}), flush=True)


arguments = TrainingArguments(
    os.environ["OUTPUT"],
    max_steps=8,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=int(os.environ.get("ACCUMULATE", "2")),
    learning_rate=1e-2,
    max_grad_norm=0.1,
    train_sampling_strategy="sequential",
    eval_strategy="steps",
    eval_steps=4,
    save_strategy="no" if "MODEL" in os.environ else "steps",  # Transformers saves no optimizer of such a model
    save_steps=4,
    logging_steps=1,
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
    fp16="LOSS_SCALE" in os.environ,
    fsdp="MODEL" not in os.environ,
    fsdp_config={"version": 2, "state_dict_type": "SHARDED_STATE_DICT"} if "MODEL" not in os.environ else None,
)
arguments.distributed_state.distributed_type = DistributedType.MULTI_GPU  # Accelerate knows no parallelism of CPUs
if "MODEL" in os.environ:
    model = LlamaForCausalLM.from_pretrained(
        os.environ["MODEL"], distributed_config=json.loads(os.environ["DISTRIBUTED"])
    )
else:
    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=4,
        )
    )  # fmt: skip
kind = Trainer if "PLAIN" in os.environ else groups.KeepstepTrainer
trainer = kind(model=model, args=arguments, train_dataset=ROWS, eval_dataset=ROWS[:10], callbacks=[Stop()])
trainer.train(resume_from_checkpoint="RESUME" in os.environ)
weights = {name: getattr(one, "full_tensor", lambda one=one: one)() for name, one in trainer.model.state_dict().items()}
if arguments.process_index == 0:
    torch.save(weights, os.environ["WEIGHTS"])
