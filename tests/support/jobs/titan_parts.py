"""A trainer made of torchtitan's own fault-tolerant parts: manager, optimizers, schedulers, checkpoint manager.

torchtitan's ``FaultTolerantTrainer`` and its models need a GPU, so the loop and the model are here. Run by
``scripts.py``; prints the lines of ``titan_shape.py``.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import keepstep.compat  # noqa: F401

# isort: split
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.distributed import utils as dist_utils
from torchtitan.experiments.torchft.checkpoint import TorchFTCheckpointManager
from torchtitan.experiments.torchft.config import FaultTolerance
from torchtitan.experiments.torchft.optimizer import TorchFTOptimizersContainer


class Trainer:
    """Train a small model on random numbers until SIGTERM."""

    def __init__(self) -> None:
        dist.init_process_group("gloo")
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("loss",))
        group = int(os.environ["REPLICA_GROUP_ID"])
        self.ft_manager = FaultTolerance(
            enable=True, group_size=2, replica_id=group, process_group_timeout_ms=20_000
        ).build()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
        for layer in (self.model[0], self.model[2], self.model):
            fully_shard(layer, mesh=self.mesh)
        self.ft_manager.maybe_set_all_reduce_hook([self.model])
        optimizers = TorchFTOptimizersContainer.Config(
            param_groups=default_adamw(lr=1e-3).param_groups, implementation="foreach"
        )
        self.optimizers = optimizers.build(model_parts=[self.model], ft_manager=self.ft_manager)
        self.lr_schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(
            optimizers=self.optimizers, training_steps=100_000
        )
        self.step = self.tokens = 0
        self.checkpointer = TorchFTCheckpointManager.Config(
            enable=True, folder=tempfile.mkdtemp(), enable_ft_dataloader_checkpoints=False
        ).build(
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={"train_state": self},
            sd_adapter=None,
            ft_manager=self.ft_manager,
        )

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step), "tokens": torch.tensor(self.tokens)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.tokens = int(state["step"]), int(state["tokens"])

    def train(self) -> None:
        x = torch.randn(8, 16)  # the same in all steps: the loss falls from the first one on
        while True:
            self.step += 1
            self.optimizers.zero_grad()
            self.tokens += len(x)
            loss = nn.functional.mse_loss(self.model(x), x.sum(1, keepdim=True))
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizers.step()
            self.lr_schedulers.step()
            extra = self.ft_manager.loss_sync_pg
            total = dist_utils.dist_sum(loss.detach(), self.mesh, extra)
            most = dist_utils.dist_max(torch.tensor(self.tokens), self.mesh, extra)
            writer = " writes" if manager.participating_rank() == 0 else ""
            groups = manager.num_participants()
            parameters: list[Any] = [*self.model.parameters()]
            whole = [one.full_tensor().detach().numpy().tobytes() for one in parameters]
            weights = hashlib.sha256(b"".join(whole)).hexdigest()[:12]
            print(f"step {self.step} groups {groups} loss {total:.4f} tokens {most:.0f} {weights}{writer}", flush=True)


trainer = Trainer()
model, adamw, manager = trainer.model, trainer.optimizers, trainer.ft_manager.manager
trainer.train()
