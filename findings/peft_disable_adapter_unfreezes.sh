#!/usr/bin/env bash
# Guess: `with model.disable_adapter():`, for the logits of the base model, leaves the adapter as it was.
# Seen: at its end each parameter of the active adapter requires a gradient. A lora_A that the script froze is trained
#   from then on, and so is an adapter that was loaded without is_trainable, which has no gradients before.
# Version: peft 0.21.2 with torch 2.13.0.
# Why it matters: the base model is the reference of a KL term or of DPO, computed so in each step. Frozen parts change
#   from the first such step on, if the optimizer has them; DistributedDataParallel and FSDP wrapped the model with
#   other trainable parameters. Nothing warns.
source "$(dirname "$0")/environment"
packages torch==2.13.0 numpy==2.4.6 accelerate==1.15.0 transformers==5.24.0 peft==0.21.2
program <<'PYTHON'
import torch
from finding import compare, show_versions
from peft import LoraConfig, PeftModel, get_peft_model

show_versions("peft", "torch")


def base():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 4))


def changed_by_a_step(model):
    """Return the parts of the adapter that a step of SGD over all parameters changes."""
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.disable_adapter(), torch.no_grad():
        reference = model(torch.ones(1, 4)) + 1
    torch.nn.functional.mse_loss(model(torch.ones(1, 4)), reference).backward()
    optimizer.step()
    return sorted(name.split(".")[-3] for name, value in model.named_parameters() if not value.equal(before[name]))


model = get_peft_model(base(), LoraConfig(target_modules=["0"], r=2, init_lora_weights=False))
for name, parameter in model.named_parameters():
    if "lora_A" in name:
        parameter.requires_grad_(False)
model.save_pretrained("adapter")
compare(
    "parts that a step with a reference changes, lora_A frozen",
    guess=["lora_B"],
    seen=changed_by_a_step(model),
    known=["lora_A", "lora_B"],
)

loaded = PeftModel.from_pretrained(base(), "adapter")
before = sum(parameter.requires_grad for parameter in loaded.parameters())
with loaded.disable_adapter():
    pass
compare(
    "parameters of a loaded adapter that require a gradient, before and after disable_adapter",
    guess=[0, 0],
    seen=[before, sum(parameter.requires_grad for parameter in loaded.parameters())],
    known=[0, 2],
)
PYTHON
