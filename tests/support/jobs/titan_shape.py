"""A trainer for torchft in the shape of torchtitan's fault-tolerant one: FSDP2 in each group, torchft between them.

Run by ``scripts.py``. It prints "step N groups G loss X tokens T DIGEST" with values of all groups and all weights.
"""

from __future__ import annotations

import hashlib
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import keepstep.compat  # noqa: F401

# isort: split
import torchft as ft  # type: ignore[import-not-found]

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class FTManager:
    """The Manager of torchtitan's ``FTManager``."""

    def __init__(self, replica_id: int) -> None:
        self.manager = ft.Manager(
            pg=ft.ProcessGroupGloo(timeout=timedelta(seconds=20)),
            min_replica_size=1,
            load_state_dict=None,
            state_dict=None,
            use_async_quorum=True,
            replica_id=f"torchtitan_ft_{replica_id}",
        )
        self.replicate_pg = ft.process_group.ManagedProcessGroup(self.manager)
        self.replicate_pg.register("dp_replicate")

    def set_all_reduce_hook(self, model: nn.Module) -> None:
        def all_reduce(output: torch.Tensor) -> None:
            dist.all_reduce(output, group=self.replicate_pg, op=dist.ReduceOp.AVG)

        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_all_reduce_hook(all_reduce)


class Optimizers(torch.optim.Optimizer):
    """A container of optimizers, which ``torchft.Optimizer`` wraps and which calls it in turn.

    It returns a state that it has made at its start: the tensors are the live ones, the learning rates are not.
    """

    def __init__(self, model: nn.Module, ft_manager: FTManager) -> None:
        self.model = model
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2)]
        super().__init__(list(model.parameters()), {})
        get_optimizer_state_dict(model, self.optimizers)  # creates the state
        self._ft_optimizer = ft.Optimizer(ft_manager.manager, self)
        self._use_ft_optimizer = True
        self.init_cache_state_dict()

    def init_cache_state_dict(self) -> None:
        self.cached = get_optimizer_state_dict(self.model, self.optimizers, options=FLAT)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        if self._use_ft_optimizer:
            self._use_ft_optimizer = False
            self._ft_optimizer.zero_grad(*args, **kwargs)
            self._use_ft_optimizer = True
        else:
            for one in self.optimizers:
                one.zero_grad(*args, **kwargs)

    def step(self, *args: Any, **kwargs: Any) -> None:  # type: ignore[override]  # torchtitan's returns no loss
        if self._use_ft_optimizer:
            self._use_ft_optimizer = False
            self._ft_optimizer.step(*args, **kwargs)
            self._use_ft_optimizer = True
        else:
            for one in self.optimizers:
                one.step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        return self.cached

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_optimizer_state_dict(self.model, self.optimizers, state_dict, options=FLAT)
        self.init_cache_state_dict()


class Trainer:
    """Train a small model on random numbers until SIGTERM."""

    def __init__(self) -> None:
        dist.init_process_group("gloo")
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("loss",))
        self.ft_manager = FTManager(int(os.environ["REPLICA_GROUP_ID"]))
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
        for layer in (self.model[0], self.model[2], self.model):
            fully_shard(layer, mesh=self.mesh)
        self.ft_manager.set_all_reduce_hook(self.model)
        self.optimizers = Optimizers(self.model, self.ft_manager)
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizers.optimizers[0], lambda step: 0.99**step)
        self.step = self.tokens = 0
        self.ft_manager.manager.set_state_dict_fns(self.load_states, self.states)

    def states(self) -> dict[str, Any]:
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": self.optimizers.state_dict(),
            "lr_scheduler": self.lr_scheduler.state_dict(),
            "train_state": {"step": self.step, "tokens": self.tokens},
        }

    def load_states(self, states: dict[str, Any]) -> None:
        set_model_state_dict(self.model, states["model"])
        self.optimizers.load_state_dict(states["optimizer"])
        self.lr_scheduler.load_state_dict(states["lr_scheduler"])
        self.step, self.tokens = states["train_state"]["step"], states["train_state"]["tokens"]

    def reduced(self, value: torch.Tensor, op: str) -> float:
        """Reduce a value over the ranks of the group, then over the groups."""
        for group in (self.mesh, self.ft_manager.replicate_pg):
            value = funcol.all_reduce(value, reduceOp=op, group=group)
        return float(value.item())

    def train(self) -> None:
        x = torch.randn(8, 16)  # the same in all steps: the loss falls from the first one on
        while True:
            self.step += 1
            self.optimizers.zero_grad()
            self.tokens += len(x)
            loss = nn.functional.mse_loss(self.model(x), x.sum(1, keepdim=True))
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizers.step()
            self.lr_scheduler.step()
            total = self.reduced(loss.detach(), "sum")
            most = self.reduced(torch.tensor(self.tokens, dtype=torch.int64), "max")
            writer = " writes" if self.ft_manager.manager.participating_rank() == 0 else ""
            groups = self.ft_manager.manager.num_participants()
            parameters: list[Any] = [*self.model.parameters()]
            whole = [one.full_tensor().detach().numpy().tobytes() for one in parameters]
            weights = hashlib.sha256(b"".join(whole)).hexdigest()[:12]
            print(f"step {self.step} groups {groups} loss {total:.4f} tokens {most:.0f} {weights}{writer}", flush=True)


trainer = Trainer()
model, adamw, manager = trainer.model, trainer.optimizers, trainer.ft_manager.manager
trainer.train()
