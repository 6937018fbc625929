"""Training loops that torch's DistributedDataParallel trains, to compare with keepstep's.

``python -m tests.support.models.training_loops RANK STORE RESULT`` trains all of them with torch, as one of two ranks,
and writes the weights of each.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

STEPS = 6
RANKS = 2


class Net(nn.Module):
    """Two heads on a body, three experts, and an embedding."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(4, 6), nn.Linear(6, 2), nn.Linear(6, 2)
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.table = nn.Embedding(7, 4, sparse=sparse)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                values = torch.arange(parameter.numel(), dtype=torch.float32)
                parameter.copy_(torch.sin(1 + number + values).view_as(parameter) / 2)

    def forward(self, x: torch.Tensor, head: str = "both", expert: int | None = None, rows: Any = None) -> Any:
        if rows is not None:
            x = x + self.table(rows)
        hidden = self.body(x).tanh()
        if expert is not None:
            hidden = self.experts[expert](hidden)
        if head == "both":
            return self.left(hidden) + self.right(hidden)
        return hidden if head == "none" else getattr(self, head)(hidden)


class Answer:
    """An output in which torch finds no tensor."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class AnswersWithObject(Net):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return Answer(super().forward(*args, **kwargs))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.linspace(rank - step, 2 + rank + step, 12).view(3, 4).cos()


@dataclass
class Loop:
    """One loop. ``loss`` gets the wrapped model, a batch, the rank and the step."""

    loss: Callable[[Any, torch.Tensor, int, int], Any]
    change: Callable[[Net, Any, int], None] = lambda _net, _optimizer, _step: None
    """Changes the model before a step."""
    net: Callable[[], Net] = Net
    unused: bool = False
    """Value of torch's ``find_unused_parameters``."""
    wraps_again: int = -1
    """The step before which torch needs another wrapper."""
    optimizer: Callable[[Any], torch.optim.Optimizer] = field(
        default=lambda parameters: torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)
    )


def freeze(net: Net, _optimizer: Any, step: int) -> None:
    if step == 2:
        net.body.requires_grad_(requires_grad=False)


def frozen_at_first() -> Net:
    net = Net()
    net.body.requires_grad_(requires_grad=False)
    return net


def unfreeze(net: Net, _optimizer: Any, step: int) -> None:
    net.body.requires_grad_(requires_grad=step >= 3)


def replace(net: Net, optimizer: Any, step: int) -> None:
    if step == 3:
        old, net.left.bias = net.left.bias, nn.Parameter(net.left.bias.detach() + 1)
        group = optimizer.param_groups[0]["params"]
        group[[one is old for one in group].index(True)] = net.left.bias


def add(net: Net, optimizer: Any, step: int) -> None:
    if step == 3:
        added = nn.Linear(2, 2)
        net.add_module("left", nn.Sequential(net.left, added))
        with torch.no_grad():
            added.weight.copy_(torch.tensor([[1.0, 0.5], [-0.5, 1.0]]))
            added.bias.zero_()
        optimizer.add_param_group({"params": list(added.parameters())})


def cast(net: Net, _optimizer: Any, step: int) -> None:
    if step == 3:
        net.double()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def plain(ddp: Any, x: torch.Tensor, _rank: int, _step: int) -> Any:
    return ddp(x.to(ddp.module.body.weight.dtype)).square().sum()


LOOPS = {
    "frozen later": Loop(plain, freeze, unused=True),
    "experts that some or no ranks use": Loop(
        lambda ddp, x, rank, step: ddp(x, expert=rank if step % 2 else 0).square().sum(), unused=True
    ),
    "unfrozen later": Loop(plain, unfreeze, frozen_at_first, unused=True, wraps_again=3),
    "replaced later": Loop(plain, replace, unused=True, wraps_again=3),
    "added later": Loop(plain, add, unused=True, wraps_again=3),
    "cast later": Loop(plain, cast, unused=True, wraps_again=3, optimizer=sgd),
    "several forward passes": Loop(
        lambda ddp, x, _rank, _step: sum(
            (
                ddp(x * scale, expert=expert, rows=torch.tensor([1, 2, 1])).square().sum()
                for expert, scale in enumerate((1, 2, 3))
            ),
            torch.zeros(()),
        )
    ),
    "two heads": Loop(
        lambda ddp, x, _rank, _step: (
            ddp(x, "left", 0, torch.tensor([0, 1, 2])).sum()
            + ddp(x, "right", 1).square().sum()
            + ddp(x, "none", 2).sum()
        )
    ),
    "a penalty on parameters that the pass skips": Loop(
        lambda ddp, x, _rank, _step: ddp(x).square().sum() + sum(one.square().sum() for one in ddp.module.parameters())
    ),
    "a head of the inner module": Loop(
        lambda ddp, x, _rank, _step: (
            ddp.module.left(ddp(x, "none", 0, torch.tensor([0, 3, 2]))).sum()
            + ddp.module.right(ddp.module.experts[1](ddp.module.experts[2](ddp(x, "none")))).square().sum()
        )
    ),
    "an object as output": Loop(
        lambda ddp, x, _rank, _step: sum(
            (ddp(x, expert=one, rows=torch.tensor([6, 2, 6])).value.square().sum() for one in range(3)), torch.zeros(())
        ),
        net=AnswersWithObject,
    ),
    "sparse gradients": Loop(
        lambda ddp, x, rank, step: ddp(x, rows=torch.tensor([rank, step, rank])).square().sum(),
        net=lambda: Net(sparse=True),
        unused=True,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    ),
}


def train_with_torch(loop: Loop, rank: int) -> dict[str, torch.Tensor]:
    net = loop.net()
    optimizer = loop.optimizer(net.parameters())

    def wrap() -> Any:
        return nn.parallel.DistributedDataParallel(net, find_unused_parameters=loop.unused)

    ddp = wrap()
    for step in range(STEPS):
        loop.change(net, optimizer, step)
        if step == loop.wraps_again:
            ddp = wrap()
        optimizer.zero_grad()
        loop.loss(ddp, batch(rank, step), rank, step).backward()
        optimizer.step()
    return net.state_dict()


def main() -> None:
    rank, store, result = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    torch.save({name: train_with_torch(loop, rank) for name, loop in LOOPS.items()}, result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
