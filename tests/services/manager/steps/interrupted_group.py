"""A replica group of a process of its own that is interrupted between the commit of a step and the weights.

Arguments: lighthouse, name, loop, what happens to the group or "nothing", and the step at which it does. At the end the
script prints a JSON object: ``digests``, of the state that is equal in all groups, by step; ``caught``, the exceptions
that left the loop, each with the step and the digest at that time.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import nn

from keepstep import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from keepstep.local_sgd import Decoupled, DiLoCo, LocalSGD

STEPS = 6
SECOND = timedelta(seconds=1)

lighthouse, name, loop, fault = sys.argv[1:5]
FAULTY = int(sys.argv[5])


class Second(torch.optim.SGD):
    """Fails once, before it has changed anything."""

    failed = False

    def step(self, closure: Any = None) -> None:
        if fault == "error" and manager.current_step() == FAULTY and not Second.failed:
            Second.failed = True
            raise RuntimeError("the second optimizer fails")
        super().step(closure)


def on_step(scalars: dict[str, float], step: int) -> None:
    if step == FAULTY and fault.startswith("SIG"):
        os.kill(os.getpid(), signal.Signals[fault])


def terminated(*_: object) -> None:
    raise InterruptedError("SIGUSR1")


signal.signal(signal.SIGUSR1, terminated)
torch.manual_seed(sum(map(ord, name)))
first, second = nn.Linear(3, 3), nn.Linear(3, 2)
model = nn.Sequential(first, second)
if loop in ("LocalSGD", "DiLoCo", "decoupled"):
    inner: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parts = [inner]
else:
    one, two = torch.optim.SGD(first.parameters(), lr=0.1), Second(second.parameters(), lr=0.1, momentum=0.9)
    both = Second(model.parameters(), lr=0.1, momentum=0.9)
    parts = [one, two, both]


def state() -> dict[str, Any]:
    return {"model": model.state_dict(), "optimizers": [part.state_dict() for part in parts]}


def load(state: dict[str, Any]) -> None:
    model.load_state_dict(state["model"])
    for part, loaded in zip(parts, state["optimizers"], strict=True):
        part.load_state_dict(loaded)


manager = Manager(
    ProcessGroupGloo(timeout=30 * SECOND),
    load,
    state,
    min_replica_size=2,
    use_async_quorum=loop not in ("DiLoCo", "decoupled"),
    timeout=30 * SECOND,
    lighthouse_addr=lighthouse,
    replica_id=name,
    on_step=on_step,
)


def loss(module: nn.Module) -> torch.Tensor:
    """Of a batch of its own in each group."""
    random = torch.Generator().manual_seed(1000 * manager.current_step() + ord(name))
    return module(torch.randn(4, 3, generator=random)).square().sum()


def commits_in_optimizer() -> Callable[[], None]:
    ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, both)

    def step() -> None:
        optimizer.zero_grad()
        loss(ddp).backward()
        optimizer.step()

    return step


def commits_with_scaler() -> Callable[[], None]:
    ddp, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, both)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    manager.register_state_dict_fn("scaler", scaler.load_state_dict, scaler.state_dict)

    def step() -> None:
        optimizer.zero_grad()
        scaler.scale(loss(ddp)).backward()
        scaler.step(optimizer)
        scaler.update()

    return step


def two_optimizers(*, guarded: bool) -> Callable[[], None]:
    ddp = DistributedDataParallel(manager, model)
    first_one, second_one = Optimizer(manager, one), Optimizer(manager, two)

    def change() -> None:
        first_one.optim.step()
        second_one.optim.step()

    def step() -> None:
        first_one.zero_grad()
        second_one.zero_grad()
        loss(ddp).backward()
        if guarded:
            with manager.committing() as committed:
                if committed:
                    change()
        elif manager.should_commit():
            change()

    return step


def inner_step() -> None:
    inner.zero_grad()
    loss(model).backward()
    inner.step()


def main() -> None:
    caught: list[tuple[str, int, str]] = []
    digests: dict[int, str] = {}
    context: Any = None
    if loop == "LocalSGD":
        step, context = inner_step, LocalSGD(manager, model, inner, sync_every=2)
    elif loop in ("DiLoCo", "decoupled"):
        outer = Second(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        how = {"decoupled": Decoupled(min_groups=2)} if loop == "decoupled" else {}
        step, context = inner_step, DiLoCo(manager, [first, second], inner, outer, sync_every=4, **how)
    else:
        step = {
            "optimizer": commits_in_optimizer,
            "scaler": commits_with_scaler,
            "committing": lambda: two_optimizers(guarded=True),
            "should_commit": lambda: two_optimizers(guarded=False),
        }[loop]()

    def digest() -> str:
        if loop in ("DiLoCo", "decoupled"):
            equal = [one for part in context.state_dict()["fragments"] for one in part["original_parameters"].values()]
        else:
            equal = list(model.state_dict().values())
        return hashlib.sha256(b"".join(one.numpy().tobytes() for one in equal)).hexdigest()[:16]

    def train() -> None:
        while (before := manager.current_step()) < STEPS:
            try:
                step()
            except (KeyboardInterrupt, InterruptedError, RuntimeError) as error:
                caught.append((type(error).__name__, manager.current_step(), digest()))
            if manager.current_step() > before:
                digests[manager.current_step()] = digest()

    if context is None:
        train()
    else:
        with context:
            train()
    manager.finish()
    digests[manager.current_step()] = digest()
    manager.shutdown()
    print(json.dumps({"caught": caught, "digests": digests}))


main()
