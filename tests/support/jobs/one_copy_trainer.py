"""Train a sharded model with one copy, and end or freeze where the test says: ``ONE_COPY_FAULTS``.

Each fault is ``step:rank:phase``, once in a job, whose directory is ``ONE_COPY_DIRECTORY``. Phases: ``forward``,
``backward``, ``copy`` (between two frames to the keeper), ``vote``, ``committed``; in a recovery ``configuring``,
``reading`` (by a newcomer), ``serving`` (by another rank) and ``ending`` (before the last vote); and ``freeze``
(SIGSTOP before the backward pass). With ``ONE_COPY_EVERY`` a fault waits until the durable checkpoint before it is
committed.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import TensorDataset

from keepstep.one_copy import OneCopy
from keepstep.one_copy.copies.copy_sender import CopySender
from keepstep.one_copy.recovery.sources import Sources
from keepstep.one_copy.shard.own_shard import OwnShard
from keepstep.one_copy.world.world_groups import WorldGroups

STEPS = os.environ.get("ONE_COPY_STEPS", "8")
"""Number of the last step, or a file that has it, which may change."""
KIND = os.environ.get("ONE_COPY_KIND", "plain")
if KIND == "torch 2.12" and hasattr(FSDPModule, "reset_iter_state"):
    del FSDPModule.reset_iter_state  # new in torch 2.13
FAULTS = [one.split(":") for one in os.environ.get("ONE_COPY_FAULTS", "").split(",") if one]
DIRECTORY = Path(os.environ["ONE_COPY_DIRECTORY"])
BATCH = 16
HOLDS = [int(step) for step in os.environ.get("ONE_COPY_HOLDS", "").split(",") if step]
"""Committed steps after which ranks wait for a file ``go.STEP``."""
EVERY = int(os.environ.get("ONE_COPY_EVERY", "0"))


def event(name: str, **facts: Any) -> None:
    print(json.dumps({"event": name, "pid": os.getpid(), **facts}), flush=True)


def fault(phase: str, rank: int | None = None) -> None:
    """End or freeze this process, if it is its turn."""
    for step, of_rank, wanted in FAULTS:
        here = job.rank if rank is None and job._shard.held is not None else rank
        if (wanted, int(step)) == (phase, now[0]) and (here is None or int(of_rank) == here):
            mark = DIRECTORY / f"{step}.{of_rank}.{wanted}"
            try:
                mark.touch(exist_ok=False)
            except FileExistsError:
                continue
            while EVERY and job.last_checkpoint.step < now[0] // EVERY * EVERY:
                time.sleep(0.01)  # nothing tells when a relay commits it
            event("fault", phase=phase, step=now[0])
            os.kill(os.getpid(), signal.SIGSTOP if phase == "freeze" else signal.SIGKILL)


class Net(nn.Module):
    def __init__(self, noisy: bool) -> None:
        super().__init__()
        layers = [nn.Linear(10, 30), nn.Tanh(), nn.Linear(30, 30, bias=False), nn.Tanh(), nn.Linear(30, 3)]
        self.layers = nn.Sequential(*layers)
        self.norm = nn.BatchNorm1d(30) if noisy else nn.Identity()
        self.drop = nn.Dropout(0.1) if noisy else nn.Identity()
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.sometimes = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, step: int) -> torch.Tensor:
        y: torch.Tensor = self.drop(self.norm(self.layers[:2](x)))
        y = self.layers[2:](y) * self.frozen
        return y * self.sometimes if step % 2 else y


class Lion(torch.optim.Optimizer):
    """An optimizer that keepstep does not know."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ARG002
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    moment = self.state[one].setdefault("moment", torch.zeros_like(one))
                    one.add_(torch.sign(moment * 0.9 + one.grad * 0.1), alpha=-group["lr"])
                    moment.mul_(0.99).add_(one.grad, alpha=0.01)


class Sent(torch.autograd.Function):
    """Gives an activation to the next stage of a pipeline, and takes its gradient from there."""

    @staticmethod
    def forward(ctx: Any, activation: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        ctx.save_for_backward(activation)
        dist.broadcast(activation.detach(), group=group, group_src=0)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        gradient = torch.empty_like(ctx.saved_tensors[0])
        dist.broadcast(gradient, group=ctx.group, group_src=1)
        return gradient, None


class Received(torch.autograd.Function):
    """The other side of ``Sent``."""

    @staticmethod
    def forward(ctx: Any, target: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        activation = target.detach().clone()
        dist.broadcast(activation, group=group, group_src=0)
        return activation

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        dist.broadcast(gradient.contiguous(), group=ctx.group, group_src=1)
        return gradient, None


class FirstStage(nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group, self.front = group, nn.Linear(10, 30)

    def forward(self, x: torch.Tensor, _: int) -> torch.Tensor:
        activation: torch.Tensor = Sent.apply(self.front(x).tanh(), self.group)  # type: ignore[no-untyped-call]
        return activation


class LastStage(nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group, self.back = group, nn.Linear(30, 3)

    def forward(self, x: torch.Tensor, _: int) -> torch.Tensor:
        target = torch.zeros(len(x), 30, requires_grad=True)
        y: torch.Tensor = self.back(Received.apply(target, self.group))  # type: ignore[no-untyped-call]
        return y


def build(mesh: Any) -> tuple[Any, ...]:
    torch.manual_seed(7)
    data = mesh
    if KIND == "pipeline":
        data, stage = mesh["fsdp"], mesh["pp"].get_local_rank()
        model: Any = (FirstStage, LastStage)[stage](mesh["pp"].get_group())
        fully_shard(model, mesh=data)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
        return model, optimizer, schedule, torch.amp.GradScaler("cpu", enabled=False)
    model = Net(noisy=KIND in ("plain", "scaler"))
    if KIND == "tensor parallel":
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        parallelize_module(
            model.layers, mesh["tp"], {"0": ColwiseParallel(use_local_output=True), "2": RowwiseParallel()}
        )
        data = mesh["fsdp"]
    if KIND != "adafactor":  # that of torch 2.13 cannot step DTensors
        fully_shard(model.layers[2], mesh=data)
        fully_shard(model, mesh=data)
    trained = [one for one in model.parameters() if one.requires_grad]
    match KIND:
        case "lion":
            optimizer = Lion(trained, 1e-3)
        case "adafactor":
            optimizer = torch.optim.Adafactor(trained, lr=1e-2)
        case "muon":
            optimizer = torch.optim.Muon([one for one in trained if one.ndim == 2], lr=1e-2)
        case _:
            groups: Any = [{"params": trained[:2]}, {"params": trained[2:], "weight_decay": 0.1}]
            optimizer = torch.optim.AdamW(groups, lr=torch.tensor(1e-2) if KIND == "tensor lr" else 1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3, enabled=KIND == "scaler")
    return model, optimizer, schedule, scaler


def hook(cls: Any, method: str, phase: str, rank: Any = None) -> None:
    inner = getattr(cls, method)

    def outer(self: Any, *args: Any, **kwargs: Any) -> Any:
        fault(phase, rank(self, args) if rank else None)
        return inner(self, *args, **kwargs)

    setattr(cls, method, outer)


torch.set_num_threads(1)
now = [0]
sent = [0]
mesh = {"tensor parallel": {"fsdp": -1, "tp": 2}, "pipeline": {"fsdp": -1, "pp": 2}}.get(KIND)
job = OneCopy(build, mesh=mesh, copies=int(os.environ.get("ONE_COPY_COPIES", "1")), durable_every=EVERY)
event("started", rank=0)
send = CopySender._send_state


def send_and_count(self: Any, part: str, state: Any, *args: Any, **kwargs: Any) -> None:
    send(self, part, state, *args, **kwargs)
    if part == "gradients":
        fault("copy")


send_early = CopySender._send_early


def send_early_and_count(self: Any, *args: Any) -> None:
    send_early(self, *args)
    fault("copy")


CopySender._send_state = send_and_count  # type: ignore[method-assign]
CopySender._send_early = send_early_and_count  # type: ignore[method-assign, assignment]
vote = WorldGroups.vote


def voting(self: Any, values: list[int], timeout: Any) -> list[int]:
    fault("vote" if len(values) > 1 else "ending")
    return vote(self, values, timeout)


WorldGroups.vote = voting  # type: ignore[method-assign]
hook(WorldGroups, "configure", "configuring")
settle = OwnShard.settle


def settling(self: Any, *args: Any, **kwargs: Any) -> None:
    fault("serving")
    settle(self, *args, **kwargs)


OwnShard.settle = settling  # type: ignore[method-assign]
shard_of = Sources.shard_of


def reading(self: Any, rank: int) -> Any:
    for step, _, wanted in FAULTS:
        if wanted == "reading" and int(step) <= self._reader.state.step:
            now[0] = int(step)
            fault("reading", rank)
    return shard_of(self, rank)


Sources.shard_of = reading  # type: ignore[method-assign]


def loader_of_digits() -> Any:
    """Return a loader of real data, with a worker process. Each sample has its number."""
    pixels, labels = load_digits(n_class=3, return_X_y=True)
    x, goal = torch.tensor(pixels[:, 20:30] / 16, dtype=torch.float32), nn.functional.one_hot(torch.tensor(labels), 3)
    return job.loader(TensorDataset(x, goal.float(), torch.arange(len(x))), 64, seed=5, num_workers=1)


digits = loader_of_digits() if KIND == "digits" else None


def digest() -> str:
    """Return the digest of the shard of this rank."""
    found = hashlib.sha256()
    named: list[Any] = list(model.named_parameters()) + list(model.named_buffers())
    for name, one in sorted(named, key=lambda pair: pair[0]):
        for value in (one, *(value for _, value in sorted(optimizer.state.get(one, {}).items()))):
            own = value.to_local() if hasattr(value, "to_local") else torch.as_tensor(value)
            found.update(name.encode() + own.detach().contiguous().numpy().tobytes())
    return found.hexdigest()[:12]


while job.step < int(STEPS if STEPS.isdigit() else Path(STEPS).read_text()):
    while job.step in HOLDS and not (DIRECTORY / f"go.{job.step}").exists():
        time.sleep(0.02)  # until the test, another process, creates the file
    with job.attempt() as (model, optimizer, _, scaler):
        now[0] = job.step
        random = torch.Generator().manual_seed(1000 + job.step)
        x, goal = torch.randn(BATCH, 10, generator=random), torch.randn(BATCH, 3, generator=random)
        share = job.share(BATCH)
        if KIND == "scaler" and job.step == 2 and job.rank == 1:
            goal = goal * 1e36
        x, goal = x[share.indices], goal[share.indices]
        samples, weight = list(share.indices), share.weight
        if digits is not None:
            x, goal, numbers = digits.batch()
            samples, weight = numbers.tolist(), digits.weight
        for micro in range(2):
            fault("forward")
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(micro == 1)
            loss = (model(x, job.step) - goal).pow(2).mean() * weight / 2
            fault("freeze")
            scaler.scale(loss).backward()
            fault("backward")
        if KIND == "adafactor":
            for one in model.parameters():
                if one.grad is not None:
                    dist.all_reduce(one.grad)
        if KIND == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        total = loss.detach().clone()
        dist.all_reduce(total)
        before = job.step
        done = job.commit(scaler if KIND == "scaler" else None)
        if done:
            facts: Any = {"loss": float(total) / job.world_size, "world": job.world_size}
            facts["samples"] = samples if weight else []
            event("committed", step=job.step, rank=job.rank, digest=digest(), **facts)
        fault("committed")
event(
    "finished",
    rank=job.rank,
    step=job.step,
    digest=digest(),
    lr=float(optimizer.param_groups[0]["lr"]),
    scale=scaler.get_scale(),
    kept=job.copies_bytes,
    random=float(torch.rand(())),
)
job.finish()
event("closed", id=job.last_checkpoint.id)
