"""Groups that train with a Manager: kill and heal, kinds of arithmetic, and the cost of a step."""

from __future__ import annotations

import hashlib
import itertools
import os
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from keepstep import DistributedDataParallel, ManagedProcessGroup, Manager, Optimizer
from tests.gpu.check import DIGEST, Check, Result
from tests.gpu.rank import TIMEOUT, Rank, seconds_of

KILL_AFTER = 5
"""Committed steps before one of the groups is killed."""
STEPS_AFTER_HEAL = 10
STEPS = 12
"""Steps of a variant of training."""
FEATURES, BATCH = 256, 32
TIMED_STEPS, WARM_UP = 20, 5
COMMIT_LIMIT_SECONDS = 5.0
"""Limit from the kill to the next commit; the goal for one machine is 0.5 s, which the report shows."""


class Training:
    """One group: a model, its optimizer, and a Manager."""

    def __init__(
        self,
        rank: Rank,
        model: nn.Module,
        *,
        fused: bool | None = None,
        min_groups: int = 2,
        catch_up: bool = False,
    ) -> None:
        self.rank = rank
        self.model = model.to(rank.device)
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=fused)
        self.manager = Manager(
            pg=rank.process_group(),
            load_state_dict=self._load,
            state_dict=lambda: {"model": self.model.state_dict(), "optimizer": self.inner.state_dict()},
            min_replica_size=min_groups,
            timeout=TIMEOUT,
            quorum_timeout=TIMEOUT,
            rank=0,
            world_size=1,
            lighthouse_addr=rank.lighthouse,
            replica_id=f"g{rank.index}",
        )
        self.ddp = DistributedDataParallel(self.manager, self.model)
        self.optimizer = Optimizer(self.manager, self.inner, catch_up=catch_up)

    def _load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.inner.load_state_dict(state["optimizer"])

    def digest(self) -> str:
        """Return a digest of model and optimizer, bit for bit."""
        total = hashlib.sha256()
        for tensor in _tensors([self.model.state_dict(), self.inner.state_dict()["state"]]):
            total.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return total.hexdigest()[:16]


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for key in sorted(value, key=str):
            yield from _tensors(value[key])
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)


def small_model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.ReLU(), nn.Linear(FEATURES, 16))


def loss_of(rank: Rank, module: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    inputs = torch.randn(BATCH, FEATURES, device=rank.device)
    targets = torch.randint(16, (BATCH,), device=rank.device)
    return nn.functional.cross_entropy(module(inputs), targets)


def kill_and_heal(rank: Rank, *, catch_up: bool = False) -> Result:
    training = Training(rank, small_model(rank.index + 10 * rank.life), catch_up=catch_up)
    manager, victim = training.manager, rank.index == rank.ranks - 1
    commits, goal = [], None
    while goal is None or manager.current_step() < goal:
        training.optimizer.zero_grad()
        loss_of(rank, training.ddp).backward()
        if not training.optimizer.step():
            continue
        commits.append(time.monotonic())
        step = manager.current_step()
        if victim and rank.life == 0 and step >= KILL_AFTER and manager.num_participants() == rank.ranks:
            os.kill(os.getpid(), signal.SIGKILL)
        if victim and rank.life == 1 and rank.told("goal") is None and manager.num_participants() == rank.ranks:
            rank.tell("goal", str(step + STEPS_AFTER_HEAL))
        told = rank.told("goal")
        goal = None if told is None else int(told)
    digest = training.digest()
    manager.shutdown()
    gap = max(after - before for before, after in itertools.pairwise(commits))
    assert victim or gap < COMMIT_LIMIT_SECONDS, f"{gap:.2f} s without a commit (limit {COMMIT_LIMIT_SECONDS:g} s)"
    return {DIGEST: digest, "kill to next commit, s": round(gap, 3), "steps": manager.current_step()}


def train_variant(rank: Rank, variant: str) -> Result:
    model = small_model(rank.index)
    training = Training(rank, model, fused=True if variant == "fused" else None)
    module: Callable[[torch.Tensor], torch.Tensor] = training.ddp
    if variant == "compile":
        module = torch.compile(training.ddp)
    half = torch.float16 if variant == "scaler" and rank.on_gpu else torch.bfloat16
    scaler = torch.amp.GradScaler(rank.device.type, init_scale=2.0**10) if variant == "scaler" else None
    last, met = float("nan"), False
    groups = ManagedProcessGroup(training.manager)
    while training.manager.current_step() < STEPS:
        training.optimizer.zero_grad()
        with torch.autocast(rank.device.type, dtype=half, enabled=variant in ("autocast", "scaler")):
            loss = loss_of(rank, module)
        last = loss.item()
        if scaler is None:
            loss.backward()
            met = groups.barrier().wait()  # reduces a tensor of its own, on the device of the process group
            training.optimizer.step()
        else:
            scaler.scale(loss).backward()
            scaler.step(training.optimizer)
            scaler.update()
    digest = training.digest()
    training.manager.shutdown()
    assert last == last, "the loss is a NaN"  # noqa: PLR0124
    assert met or scaler is not None, "the barrier of the last step failed"
    return {DIGEST: digest, "last loss": round(last, 3)}


def step_cost(rank: Rank) -> Result:
    """A step of plain DDP and one of keepstep, in the same processes."""
    wide, layers = (768, 12) if rank.on_gpu else (64, 2)
    plain = _time_plain(rank, _transformer(wide, layers), wide)
    ours = _time_ours(rank, _transformer(wide, layers), wide)
    parameters = sum(one.numel() for one in _transformer(wide, layers).parameters())
    return {
        "parameters, M": round(parameters / 1e6, 1),
        "plain DDP, ms": round(1e3 * plain, 2),
        "keepstep, ms": round(1e3 * ours, 2),
        "ratio": round(ours / plain, 3),
    }


def _transformer(wide: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(wide, wide // 64 or 1, 4 * wide, dropout=0.0, batch_first=True)
    return nn.Sequential(nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), nn.Linear(wide, 50 * wide))


def _time_steps(rank: Rank, wide: int, module: nn.Module, begin: Callable[[], Any], end: Callable[[], Any]) -> float:
    inputs = torch.randn(4, 128 if rank.on_gpu else 16, wide, device=rank.device)

    def step() -> None:
        begin()
        module(inputs).square().mean().backward()
        end()
        rank.synchronize()

    for _ in range(WARM_UP):
        step()
    return statistics.median(seconds_of(step) for _ in range(TIMED_STEPS))


def _time_plain(rank: Rank, model: nn.Module, wide: int) -> float:
    store = rank.store("plain")
    backend = "nccl" if rank.on_gpu else "gloo"
    dist.init_process_group(backend, store=store, rank=rank.index, world_size=rank.ranks, timeout=TIMEOUT)
    module = TorchDDP(model.to(rank.device))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    seconds = _time_steps(rank, wide, module, optimizer.zero_grad, optimizer.step)
    dist.destroy_process_group()
    return seconds


def _time_ours(rank: Rank, model: nn.Module, wide: int) -> float:
    training = Training(rank, model)
    seconds = _time_steps(rank, wide, training.ddp, training.optimizer.zero_grad, training.optimizer.step)
    training.manager.shutdown()
    return seconds


_VARIANTS = {
    "autocast": ("autocast", ""),
    "scaler": ("autocast and a GradScaler", ""),
    "fused": ("fused AdamW", ""),
    "compile": ("torch.compile", "compiling takes a minute on a CPU"),
}
CHECKS = (
    Check(
        "kill_and_heal",
        "Three groups train; one is killed, heals, and all weights are equal bit for bit.",
        kill_and_heal,
        ranks=3,
        seconds=90.0,
        restarted=frozenset({2}),
        lighthouse=True,
    ),
    Check(
        "catch_up",
        "The same with a group that catches up beside the others, which do not wait for it.",
        partial(kill_and_heal, catch_up=True),
        ranks=3,
        seconds=90.0,
        restarted=frozenset({2}),
        lighthouse=True,
    ),
    *(
        Check(
            f"train_{name}",
            f"Two groups train with {what}, and their weights are equal bit for bit.",
            partial(train_variant, variant=name),
            seconds=120.0,
            needs_gpu=reason,
            lighthouse=True,
        )
        for name, (what, reason) in _VARIANTS.items()
    ),
    Check(
        "step_cost",
        "Time of a step of plain DDP, and of keepstep.",
        step_cost,
        seconds=120.0,
        lighthouse=True,
    ),
)
