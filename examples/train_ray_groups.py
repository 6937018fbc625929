"""Learn digits with Ray Train: FSDP2 inside each replica group of two workers. python examples/train_ray_groups.py

First: pip install 'ray[train]'
"""

import hashlib
import os
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.train import FailureConfig, RunConfig, ScalingConfig
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import fully_shard

from keepstep import Manager, Optimizer, ProcessGroupGloo
from keepstep.device_mesh import average_over_groups, ft_init_device_mesh
from keepstep.integrations.ray import KeepstepConfig, TorchTrainer


def train(config: dict[str, Any]) -> dict[str, Any]:
    """Train one rank of one replica group. Ray Train runs this in each worker."""
    group, rank = os.environ["REPLICA_GROUP_ID"], dist.get_rank()  # torch.distributed has the ranks of this group
    node, lighthouse = ray.get_runtime_context().get_node_id(), os.environ["KEEPSTEP_LIGHTHOUSE"]
    print(f"group {group} rank {rank} process {os.getpid()} node {node} lighthouse {lighthouse}", flush=True)
    pixels, labels = map(torch.tensor, load_digits(return_X_y=True))

    state: dict[str, Any] = {}
    manager = Manager(
        pg=ProcessGroupGloo(),  # rank i of this group, and rank i of the others
        state_dict=lambda: {name: part.state_dict() for name, part in state.items()},
        load_state_dict=lambda saved: [part.load_state_dict(saved[name]) for name, part in state.items()],
    )
    mesh = ft_init_device_mesh(
        device_type="cpu",
        mesh_shape=(2, dist.get_world_size()),  # the quorum decides the first one
        mesh_dim_names=("dp_replicate", "dp_shard"),
        replicate_dim=0,
        manager=manager,
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["dp_shard"])
    average_over_groups(model, manager)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4)
    state |= {"model": model, "adamw": adamw}
    optimizer = Optimizer(manager, adamw)
    random = torch.Generator().manual_seed(int(group) * 1000 + rank)
    while manager.current_step() < config["steps"]:
        batch = torch.randint(1500, (64,), generator=random)
        optimizer.zero_grad()  # begin the step: ask for a quorum
        nn.functional.cross_entropy(model(pixels[batch].float()), labels[batch]).backward()
        if optimizer.step() and rank == 0 and manager.current_step() % 20 == 0:
            print(f"group {group} step {manager.current_step()} groups {manager.num_participants()}", flush=True)

    manager.finish()  # wait until all groups have the final weights
    accuracy = (model(pixels[1500:].float()).argmax(1) == labels[1500:]).float().mean().item()
    weights = hashlib.sha256(b"".join(one.full_tensor().detach().numpy().tobytes() for one in model.parameters()))
    print(f"group {group} rank {rank} ends at step {manager.current_step()} weights {weights.hexdigest()}", flush=True)
    return {"step": manager.current_step(), "accuracy": accuracy}


if __name__ == "__main__":
    least, most = int(os.environ.get("LEAST", "4")), int(os.environ.get("MOST", "4"))
    trainer = TorchTrainer(
        train,
        train_loop_config={"steps": int(os.environ.get("STEPS", "2000"))},
        torch_config=KeepstepConfig(ranks=2, spares=int(os.environ.get("SPARES", "0")), backend="gloo"),
        scaling_config=ScalingConfig(
            num_workers=most if least == most else (least, most),
            placement_strategy="STRICT_PACK",  # the ranks of a group are on one node
            elastic_resize_monitor_interval_s=5,
        ),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=100)),
    )
    print(trainer.fit().return_value, flush=True)
