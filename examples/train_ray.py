"""Learn digits with Ray Train on three fault-tolerant groups: python examples/train_ray.py

First: pip install 'ray[train]'
"""

import hashlib
import os
from typing import Any

import ray.train
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from keepstep import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo
from keepstep.integrations.ray import KeepstepConfig


def train(config: dict[str, Any]) -> dict[str, Any]:
    """Train one replica group. Ray Train runs this in each worker."""
    context = ray.train.get_context()
    group, groups = context.get_world_rank(), context.get_world_size()
    pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
    data, test = TensorDataset(pixels[:1500].float(), labels[:1500]), (pixels[1500:].float(), labels[1500:])
    sampler = DistributedSampler(data, replica_rank=group, num_replica_groups=groups)
    loader = DataLoader(data, batch_size=64, sampler=sampler)

    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def load(state: dict[str, Any]) -> None:  # of a healthy group, after a restart
        model.load_state_dict(state["model"])
        adamw.load_state_dict(state["adamw"])

    manager = Manager(
        pg=ProcessGroupGloo(),
        state_dict=lambda: {"model": model.state_dict(), "adamw": adamw.state_dict()},
        load_state_dict=load,
    )
    replicated, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, adamw)
    node, lighthouse = ray.get_runtime_context().get_node_id(), os.environ["KEEPSTEP_LIGHTHOUSE"]
    print(f"group {group} process {os.getpid()} node {node} lighthouse {lighthouse}", flush=True)

    epoch, batches = 0, iter(loader)
    while manager.current_step() < config["steps"]:
        if (batch := next(batches, None)) is None:
            epoch += 1
            sampler.set_epoch(epoch)
            batches = iter(loader)
            continue
        optimizer.zero_grad()  # begin the step: ask for a quorum
        nn.functional.cross_entropy(replicated(batch[0]), batch[1]).backward()
        if optimizer.step() and manager.current_step() % 20 == 0:
            print(f"group {group} step {manager.current_step()} groups {manager.num_participants()}", flush=True)

    manager.finish()  # wait until all groups have the final weights
    accuracy = (model(test[0]).argmax(1) == test[1]).float().mean().item()
    weights = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values())).hexdigest()
    print(f"group {group} ends at step {manager.current_step()} weights {weights[:16]}", flush=True)
    return {"step": manager.current_step(), "accuracy": accuracy}


if __name__ == "__main__":
    trainer = TorchTrainer(
        train,
        train_loop_config={"steps": int(os.environ.get("STEPS", "2000"))},
        scaling_config=ScalingConfig(num_workers=3),
        torch_config=KeepstepConfig(backend="gloo", spares=int(os.environ.get("SPARES", "0"))),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=100)),
    )
    print(trainer.fit().return_value, flush=True)
