"""Train in a loop with Accelerate, with FSDP2 over the ranks of each group. Group 0 saves before the first update.

Environment variables:

OUTPUT      folder of that checkpoint
LOSS_SCALE  first scale of a GradScaler, which grows after each two updates; default: none
SAVE_AFTER  step after which it saves; default: 0
"""

from __future__ import annotations

import hashlib
import os

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState
from torch import nn

import keepstep.integrations.transformers as groups
from keepstep import Manager, ProcessGroupGloo

torch.set_num_threads(1)
group = int(os.environ["REPLICA_GROUP_ID"])
PartialState(cpu=True).distributed_type = DistributedType.MULTI_GPU  # Accelerate knows no parallelism of CPUs
accelerator = Accelerator(
    cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
)
if "LOSS_SCALE" in os.environ:
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=float(os.environ["LOSS_SCALE"]), growth_interval=2)

torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
model, adamw = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), 1e-2))
manager = Manager(pg=ProcessGroupGloo())
model, optimizer = groups.prepare(accelerator, manager, model, adamw)
manager.register_state_dict_fn("model", model.load_state_dict, model.state_dict)
manager.register_state_dict_fn("optimizer", adamw.load_state_dict, adamw.state_dict)
scaler = accelerator.scaler
if scaler is not None:
    manager.register_state_dict_fn("scaler", scaler.load_state_dict, scaler.state_dict)

torch.manual_seed(10 * group + accelerator.process_index)
while manager.current_step() < 8:
    if group == 0 and manager.current_step() == int(os.environ.get("SAVE_AFTER", "0")):
        before = scaler.state_dict() if scaler is not None else None
        skipped = optimizer.step_was_skipped
        accelerator.save_state(os.environ["OUTPUT"])
        assert optimizer.step_was_skipped == skipped
        assert scaler is None or scaler.state_dict() == before
        print(f"saved after step {manager.current_step()}, skipped {skipped}", flush=True)
    loss = 16 * model(torch.randn(4, 8)).square().mean()
    accelerator.backward(loss)
    if scaler is None:  # Accelerate unscales gradients before the clip with its own float16 only
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
manager.finish()

tensors = [one.full_tensor() for one in model.parameters()]
for state in adamw.optimizer.state.values():
    tensors += [one.full_tensor() if hasattr(one, "full_tensor") else one for one in state.values()]
digest = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in tensors)).hexdigest()
scale = scaler.state_dict() if scaler is not None else None
print(f"ends at step {manager.current_step()} digest {digest} scale {scale}", flush=True)
