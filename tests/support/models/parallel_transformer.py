"""A transformer that is cut over tensor-parallel ranks and copied over data-parallel ones, and its sharded state."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from keepstep.sharded import ShardedTensor
from keepstep.sharded.optimizer import get_param_id_to_sharded_param_map, optim_state_to_sharding_state

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH = 16, 8, 2, 6, 4
CUT_AXIS = {"query": 0, "key": 0, "value": 0, "output": 1, "up": 0, "down": 1}
"""Axis of each weight that tensor parallelism cuts; the others are whole on each rank."""
SHAPES = dict.fromkeys(("query", "key", "value", "output"), (WIDTH, WIDTH)) | {
    "embedding": (VOCABULARY, WIDTH),
    "norm": (WIDTH,),
    "up": (4 * WIDTH, WIDTH),
    "down": (WIDTH, 4 * WIDTH),
}


class _Split(torch.autograd.Function):
    """Before a layer that is cut by outputs: gradients are summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Sum(torch.autograd.Function):
    """After a layer that is cut by inputs: outputs are summed."""

    @staticmethod
    def forward(_: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(_: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


_split: Any = _Split.apply
_sum: Any = _Sum.apply


class Job:
    """One rank of a training job of ``tp * dp`` ranks. Ranks of one tensor-parallel group are neighbors."""

    def __init__(self, tp: int, dp: int) -> None:
        self.tp, self.dp, rank = tp, dp, dist.get_rank()
        self.at_tp, self.at_dp = rank % tp, rank // tp
        self.tp_group = [dist.new_group([d * tp + t for t in range(tp)]) for d in range(dp)][self.at_dp]
        self.dp_group = [dist.new_group([d * tp + t for d in range(dp)]) for t in range(tp)][self.at_tp]
        random = torch.Generator().manual_seed(1)
        self.weights = nn.ParameterDict()
        for name, shape in SHAPES.items():
            whole = torch.randn(shape, generator=random, dtype=torch.float64) / 3
            axis = CUT_AXIS.get(name)
            self.weights[name] = nn.Parameter(whole if axis is None else whole.chunk(tp, axis)[self.at_tp].clone())
        self.adam = torch.optim.Adam(self.weights.parameters(), lr=0.02)
        self.step = 0

    def _logits(self, tokens: torch.Tensor) -> torch.Tensor:
        w = self.weights
        x = functional.embedding(tokens, w["embedding"])
        normed = _split(functional.layer_norm(x, (WIDTH,), w["norm"]), self.tp_group)
        query, key, value = (
            (normed @ w[name].T).unflatten(-1, (HEADS // self.tp, WIDTH // HEADS)).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True).transpose(1, 2).flatten(2)
        x = x + _sum(mixed @ w["output"].T, self.tp_group)
        hidden = functional.gelu(_split(x, self.tp_group) @ w["up"].T)
        x = x + _sum(hidden @ w["down"].T, self.tp_group)
        logits: torch.Tensor = x @ w["embedding"].T
        return logits

    def train(self, steps: int) -> list[float]:
        """Train, and return the loss of each step over the whole batch."""
        losses = []
        for _ in range(steps):
            random = torch.Generator().manual_seed(100 + self.step)
            batch = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=random)
            tokens = batch.chunk(self.dp)[self.at_dp]
            loss = functional.cross_entropy(self._logits(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            self.adam.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            total = loss.detach().clone()
            for tensor in (total, *(one.grad for one in self.weights.values())):
                dist.all_reduce(tensor.div_(self.dp), group=self.dp_group)
            self.adam.step()
            self.step += 1
            losses.append(total.item())
        return losses

    def sharded_state(self) -> dict[str, Any]:
        """Return the state to save, or to load into."""
        model: dict[str, Any] = {}
        for name, weight in self.weights.items():
            axis = CUT_AXIS.get(name)
            offsets = () if axis is None else ((axis, self.at_tp, self.tp),)
            replica = (0 if axis is not None else self.at_tp, self.at_dp)
            model[name] = ShardedTensor.from_rank_offsets(name, weight, *offsets, replica_id=replica)
        for weight in self.weights.values():  # the state of Adam exists after the first step
            if not self.adam.state[weight]:
                self.adam.state[weight] = {
                    "step": torch.zeros(()), "exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)
                }  # fmt: skip
        adam = self.adam.state_dict()
        ids = get_param_id_to_sharded_param_map(model, self.weights.parameters())
        optim_state_to_sharding_state(adam, ids, exclude_keys=("step",))
        return {"model": model, "adam": adam, "step": self.step}

    def take(self, state: dict[str, Any]) -> None:
        """Go on from a loaded state. Its weights are there already."""
        for one in state["adam"]["state"].values():
            one["step"] = torch.tensor(float(state["step"]))
        self.adam.load_state_dict(state["adam"])
        self.step = state["step"]
