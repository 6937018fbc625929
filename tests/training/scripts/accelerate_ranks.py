"""Train in a loop with Accelerate, with FSDP2 over the ranks of each group. Group 0 saves before the first update.

``OUTPUT`` names the folder of that checkpoint.
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

torch.manual_seed(0)
plain = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
model, adamw = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), 1e-2))
manager = Manager(pg=ProcessGroupGloo())
model, optimizer = groups.prepare(accelerator, manager, model, adamw)
manager.register_state_dict_fn("model", model.load_state_dict, model.state_dict)
manager.register_state_dict_fn("optimizer", adamw.load_state_dict, adamw.state_dict)

if group == 0:
    accelerator.save_state(os.environ["OUTPUT"])
torch.manual_seed(10 * group + accelerator.process_index)
while manager.current_step() < 8:
    loss = model(torch.randn(4, 8)).square().mean()
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
manager.finish()

tensors = [one.full_tensor() for one in model.parameters()]
for state in adamw.optimizer.state.values():
    tensors += [one.full_tensor() if hasattr(one, "full_tensor") else one for one in state.values()]
digest = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in tensors)).hexdigest()
print(f"ends at step {manager.current_step()} digest {digest}", flush=True)
