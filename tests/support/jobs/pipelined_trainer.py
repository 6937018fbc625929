"""One rank of a replica group for tests: a pipeline of two stages, each sharded by FSDP2, with experts on another mesh.

The first stage has frozen parameters, and a layer that no micro-batch uses. Its embedding is tied to the output layer
of the last stage, whose experts are spread over the ranks of the stage. Gradients are clipped by the norm of the whole
model. The batch of a group follows from its number and the step, so that ``whole_weights`` can compute the weights of a
job in one process. Prints lines as ``trainer.py`` does; "committed" has also "norm" and, every ``SHOWN`` steps, this
rank's shards: "weights". Environment variable: TRAINER_SEED, of the first weights.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import Shard, distribute_tensor

sys.path.append(str(Path(__file__).parents[3]))

from keepstep import Manager, Optimizer, ProcessGroupGloo
from keepstep.device_mesh import average_over_groups, ft_init_device_mesh
from tests.support.jobs.trainer import digest, say

CAN_RUN = hasattr(_fsdp_common, "ShardPlacementResult")
"""Whether this torch shards one module over two meshes: torch 2.11 does not."""
STAGES, MICRO_BATCHES, SAMPLES = 2, 2, 4
"""``SAMPLES``: in the batch of one rank of a stage."""
WORDS, WIDTH, LENGTH = 16, 8, 4
MAX_NORM = 0.2
SHOWN = 5
PACE = 0.1
"""Seconds to sleep in each step: most steps only pass while a test waits, and eight ranks share a machine."""


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.block = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.unused = nn.Linear(WIDTH, WIDTH)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embed(words).mean(1)
        mixed: torch.Tensor = self.frozen(self.block(hidden).tanh())
        return hidden + mixed


class Experts(nn.Module):
    """``group``: of the ranks that have one expert each; None: this process has all."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.group: Any = None
        self.weight = nn.Parameter(torch.randn(count, WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: torch.Tensor, gates: torch.Tensor) -> torch.Tensor:
        if self.group is None:
            return torch.stack([gates[:, [n]] * (x @ weight) for n, weight in enumerate(self.weight)]).sum(0)
        ranks = dist.get_world_size(self.group)
        every: Any = funcol.all_gather_tensor_autograd(torch.cat([x, gates], 1), 0, self.group)
        weight: Any = self.weight
        mine = weight.to_local()[0]
        mine = mine / ranks + (mine - mine / ranks).detach()  # the gradient is a mean over the ranks, as all others
        gate = every[:, [WIDTH + dist.get_rank(self.group)]]
        routed: torch.Tensor = gate * (every[:, :WIDTH] @ mine)
        return cast("torch.Tensor", funcol.reduce_scatter_tensor_autograd(routed, "sum", 0, self.group))


class Last(nn.Module):
    def __init__(self, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, experts)
        self.experts = Experts(experts)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gates = self.router(hidden).softmax(1)
        routed = hidden + self.experts(hidden, gates)
        return cast("torch.Tensor", self.head(routed))


def stages_of(seed: int, ranks: int) -> tuple[First, Last]:
    """Return both stages of a model with one expert for each of so many ranks."""
    torch.manual_seed(seed)
    first, last = First(), Last(ranks)
    with torch.no_grad():
        last.head.weight.copy_(first.embed.weight)
    return first, last


def batch_of(group: int, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch of a rank of each stage, in the step after so many."""
    random = torch.Generator().manual_seed((group * 100_000 + step) * 10 + rank)
    words = torch.randint(WORDS, (SAMPLES, LENGTH), generator=random)
    return words, words.sum(1) % WORDS


def optimizer_of(parameters: Sequence[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01)


def clip(gradients: Sequence[torch.Tensor], square: torch.Tensor) -> float:
    norm = square.sqrt()
    for gradient in gradients:
        gradient.mul_((MAX_NORM / (norm + 1e-6)).clamp(max=1.0))
    return norm.item()


def squares(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    return sum((one.square().sum() for one in gradients), torch.zeros(()))


def whole_weights(taking_part: Sequence[Sequence[int]], ranks: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Return the weights after these steps, computed in one process.

    Args:
        taking_part: the groups that took part in each step, from the first on.
        ranks: of each stage.
    """
    first, last = stages_of(seed, ranks)
    last.head.weight = first.embed.weight
    trained = [one for one in {*first.parameters(), *last.parameters()} if one.requires_grad]
    optimizer = optimizer_of(trained)
    for step, groups in enumerate(taking_part):
        optimizer.zero_grad()
        batches = [batch_of(group, step, rank) for group in groups for rank in range(ranks)]
        words, targets = map(torch.cat, zip(*batches, strict=True))
        torch.autograd.backward(nn.functional.cross_entropy(last(first(words)), targets))
        gradients = [one.grad for one in trained if one.grad is not None]
        clip(gradients, squares(gradients))
        optimizer.step()
    return {name: one.detach() for stage in (first, last) for name, one in stage.named_parameters()}


class Trainer:
    def __init__(self, group: int, manager: Manager) -> None:
        self.group, self.manager = group, manager
        self.ranks = dist.get_world_size() // STAGES
        mesh = ft_init_device_mesh(
            device_type="cpu",
            mesh_shape=(2, STAGES, 1, self.ranks),
            mesh_dim_names=("dp_replicate", "pp", "expert_shard", "dp_shard"),
            replicate_dim=0,
            manager=manager,
        )
        self.across: Any = mesh.get_group("pp")
        self.stage, self.rank = mesh.get_local_rank("pp"), mesh.get_local_rank("dp_shard")
        self.model = self.sharded(stages_of(int(os.environ.get("TRAINER_SEED", "0")), self.ranks)[self.stage], mesh)
        average_over_groups(self.model, manager)
        self.schedule = Schedule1F1B(self.pipeline(), MICRO_BATCHES, loss_fn=nn.functional.cross_entropy)
        self.inner = optimizer_of([one for one in self.model.parameters() if one.requires_grad])
        manager.register_state_dict_fn("model", self.model.load_state_dict, self.model.state_dict)
        manager.register_state_dict_fn("optimizer", self.inner.load_state_dict, self.inner.state_dict)
        self.optimizer = Optimizer(manager, self.inner)

    def sharded(self, model: Any, mesh: Any) -> Any:
        if isinstance(model, First):
            for unit in (model.block, model.frozen, model.unused, model):
                fully_shard(unit, mesh=mesh["dp_shard"])
            return model
        spread = mesh["dp_shard"]
        weight = distribute_tensor(model.experts.weight.detach(), spread, [Shard(0)], src_data_rank=None)
        model.experts.weight, model.experts.group = nn.Parameter(weight), spread.get_group()
        over = _fsdp_common.FSDPMeshInfo(mesh["expert_shard"], shard_mesh_dim=0)
        of_experts = _fsdp_common.ShardPlacementResult(Shard(0), over)
        fully_shard(
            model, mesh=spread, shard_placement_fn=lambda one: of_experts if one is model.experts.weight else None
        )
        return model

    def pipeline(self) -> PipelineStage:
        size = SAMPLES // MICRO_BATCHES
        shapes = [torch.empty(size, LENGTH, dtype=torch.long), torch.empty(size, WIDTH), torch.empty(size, WORDS)]
        shapes[1].requires_grad_()
        shapes[2].requires_grad_()
        ends = shapes[self.stage], shapes[self.stage + 1]
        return PipelineStage(self.model, self.stage, STAGES, torch.device("cpu"), *ends, group=self.across)

    def step(self) -> float | None:
        """Take a step. Return the norm of the gradients if it was committed."""
        words, targets = batch_of(self.group, self.manager.current_step(), self.rank)
        self.optimizer.zero_grad()
        self.schedule.step(words) if self.stage == 0 else self.schedule.step(target=targets)
        tied = self.model.embed.weight if self.stage == 0 else self.model.head.weight
        dist.all_reduce(tied.grad.to_local(), group=self.across)
        grads = {name: one.grad.to_local() for name, one in self.model.named_parameters() if one.grad is not None}
        square = squares(grad for name, grad in grads.items() if name != "head.weight")
        dist.all_reduce(square)
        norm = clip([*grads.values()], square)
        return norm if self.optimizer.step() else None

    def shards(self) -> dict[str, tuple[list[int], list[float]]]:
        """Return the shape and the elements of this rank's shard of each parameter."""
        locals_ = {name: parameter.to_local().detach() for name, parameter in self.model.named_parameters()}
        return {name: ([*one.shape], one.flatten().tolist()) for name, one in locals_.items()}


def main() -> None:
    say("started")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    limit = timedelta(seconds=30)
    manager = Manager(pg=ProcessGroupGloo(timeout=limit), timeout=limit)
    trainer = Trainer(int(os.environ["REPLICA_GROUP_ID"]), manager)
    try:
        while True:
            norm = trainer.step()
            if norm is not None:
                step = manager.current_step()
                say(
                    "committed",
                    step=step,
                    digest=digest(trainer.model.state_dict(), trainer.inner.state_dict()),
                    norm=norm,
                    groups=manager.num_participants(),
                    quorum_id=manager.state_dict().get("lineage"),
                    **({"weights": trainer.shards()} if step % SHOWN == 0 else {}),
                )
            time.sleep(PACE)
    finally:
        manager.shutdown()


if __name__ == "__main__":
    main()
