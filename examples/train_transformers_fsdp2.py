"""Shard a GPT-2 over the ranks of each group: keepstep run --replicas 2 --nproc-per-replica 2 -- SCRIPT"""

import os
from pydoc_data.topics import topics  # the text of Python's help("topics")

import torch

import keepstep.integrations.transformers as groups  # before TrainingArguments  # isort: skip
from accelerate import DistributedType
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

LENGTH = 64
text = torch.frombuffer(bytearray("\n".join(topics.values()), "utf-8"), dtype=torch.uint8).long()  # a byte is a token
rows = [{"input_ids": row, "labels": row} for row in text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)]

arguments = TrainingArguments(
    output_dir=os.environ.get("CHECKPOINTS", "trainer-checkpoints"),  # a folder that all groups share: one group writes
    fsdp=True,
    fsdp_config={"version": 2, "state_dict_type": "SHARDED_STATE_DICT"},
    max_steps=int(os.environ.get("STEPS", "60")),
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    learning_rate=3e-3,
    eval_strategy="steps",
    eval_steps=10,
    save_strategy="steps",
    save_steps=10,
    load_best_model_at_end=True,
    metric_for_best_model="loss",
    report_to="none",
    disable_tqdm=True,
    use_cpu=not torch.cuda.is_available(),
)
if arguments.use_cpu:  # to try it: Accelerate ignores fsdp on the CPU, and trains a whole model on each rank
    arguments.distributed_state.distributed_type = DistributedType.MULTI_GPU

set_seed(0)  # every rank makes the same weights, and keeps its shard of them
sizes = {"vocab_size": 256, "n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 4}
model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
trainer = groups.KeepstepTrainer(model=model, args=arguments, train_dataset=rows[64:], eval_dataset=rows[:64])
trainer.train(resume_from_checkpoint="RESUME" in os.environ)

if trainer.manager.participating_rank() == 0:  # all ranks of one group
    trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")  # else save_model writes no weights
    trainer.save_model(f"{arguments.output_dir}/final")
