"""Groups of one test, each a thread, and a plain computation of what they should train.

``Member`` replaces the Manager, so that a test can try hundreds of settings; tests/services/manager/local_sgd uses real
ones.
"""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed import Work
from torch.optim import Optimizer

from keepstep.local_sgd import DiLoCo
from keepstep.process_group.works import CompletedWork
from tests.support.models.manager_double import ManagerDouble

T = TypeVar("T")

SHAPE = [((2, 2), torch.float32)]


class Lost(Work):
    """A collective that failed, in the middle of its writes."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        tensor.fill_(float("nan"))

    def wait(self, _timeout: object = None) -> bool:
        return False


class Groups:
    """Groups that take every step together.

    Args:
        size: number of groups.
        rejected: numbers of the outer steps, from 0, that do not commit, in all groups.
        lost: those whose collectives fail too.
    """

    def __init__(self, size: int, rejected: Collection[int] = (), lost: Collection[int] = ()) -> None:
        self.rejected, self.lost = {*rejected, *lost}, set(lost)
        self.barrier = threading.Barrier(size, timeout=60)
        self.contributions: list[torch.Tensor | None] = [None] * size
        self.members = [Member(self, rank) for rank in range(size)]

    def each(self, do: Callable[[Member], T]) -> list[T]:
        with concurrent.futures.ThreadPoolExecutor(len(self.members)) as pool:
            return [future.result(60) for future in [pool.submit(do, member) for member in self.members]]


class Member(ManagerDouble):
    """The Manager of one group."""

    use_async_quorum, init_sync = False, False

    def __init__(self, groups: Groups, rank: int) -> None:
        super().__init__(rank)
        self.groups = groups
        self.step = self.attempt = 0
        self.open = False
        self.states: dict[str, tuple[Callable[[Any], None], Callable[[], Any]]] = {}
        self.compared: Collection[str] | None = None
        self.reductions: list[int] = []
        """Elements of each collective."""

    def replica_id(self) -> str:
        return f"group_{self.rank}:{id(self)}"

    def register_state_dict_fn(self, key: str, load: Callable[[Any], None], save: Callable[[], Any]) -> None:
        assert key not in self.states
        self.states[key] = (load, save)

    def compare_only(self, keys: Collection[str]) -> None:
        self.compared = keys

    def current_step(self) -> int:
        return self.step

    def num_participants(self) -> int:
        return len(self.groups.members)

    def start_quorum(self) -> None:
        assert not self.open, "the open step was not ended"
        self.open = True

    def is_healing(self) -> bool:
        return False

    def leave_if_asked(self) -> None: ...

    def cancel(self) -> None:
        self.open = False

    def allreduce(self, tensor: torch.Tensor, **options: Any) -> Work:
        """Average over the groups at once, in the order of their ranks."""
        assert self.open
        assert tensor.numel(), "no collective of nothing"
        self.reductions.append(tensor.numel())
        if self.attempt in self.groups.lost:
            return Lost(tensor)
        whole = self.groups.contributions
        whole[self.rank] = tensor.clone()
        self.groups.barrier.wait()
        total = sum(one for one in whole if one is not None)
        assert isinstance(total, torch.Tensor)
        scaled = total if "reduce_op" in options else total * (1 / len(whole))
        self.groups.barrier.wait()
        tensor.copy_(scaled)
        if (write_back := options.get("write_back")) is not None:
            write_back()
        return CompletedWork(tensor)

    def should_commit(self) -> bool:
        assert self.open
        self.open = False
        committed = self.attempt not in self.groups.rejected
        self.attempt += 1
        self.step += committed
        return committed


Form = tuple[tuple[int, ...], torch.dtype]


def module_of(forms: Sequence[Form]) -> nn.Module:
    """Return a module with a parameter of each form, of the same values in every group."""
    module = nn.Module()
    for number, (shape, dtype) in enumerate(forms):
        values = torch.randn(shape, generator=torch.Generator().manual_seed(number)).to(dtype)
        module.register_parameter(f"p{number}", nn.Parameter(values))
    return module


def train(optimizer: Optimizer, group: int, step: int) -> None:
    """One inner step of a group, with gradients of its own."""
    random = torch.Generator().manual_seed(1000 * group + step)
    for parameters in optimizer.param_groups:
        for one in parameters["params"]:
            one.grad = torch.randn(one.shape, generator=random).to(one.dtype)
    optimizer.step()
    optimizer.zero_grad()


def alone() -> Any:
    """The Manager of a job of one group."""
    return Groups(1).members[0]


def make(manager: Any, model: nn.Module | None = None, sync_every: int = 2, **options: Any) -> tuple[Any, Any, DiLoCo]:
    model = model or module_of(SHAPE)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = torch.optim.SGD(model.parameters(), lr=options.pop("lr", 1.0))
    return model, inner, DiLoCo(manager, [model], inner, outer, sync_every, **options)


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [one.detach().clone() for one in model.parameters()]


def inner_of(parameters: Sequence[nn.Parameter]) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


@dataclass
class Expected:
    """The same training, computed by one process: all groups and a separate global model.

    Args:
        forms: of the parameters of each fragment.
        groups, sync_every, delay, alpha: as in DiLoCo.
        outer: builds the outer optimizer of a fragment.
        rejected: numbers of the outer steps that do not commit.
    """

    forms: Sequence[Sequence[Form]]
    groups: int
    sync_every: int
    delay: int
    alpha: float
    outer: Callable[[Any], Optimizer]
    rejected: Collection[int] = ()
    step: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.globals = [list(module_of(forms).parameters()) for forms in self.forms]
        self.outers = [self.outer(one) for one in self.globals]
        self.locals = [[list(module_of(forms).parameters()) for forms in self.forms] for _ in range(self.groups)]
        self.inners = [inner_of([one for fragment in mine for one in fragment]) for mine in self.locals]

    @torch.no_grad()
    def run(self, inner_steps: int) -> None:
        period = self.sync_every // len(self.forms)
        attempt = 0
        gradients: list[torch.Tensor] = []
        for step in range(inner_steps):
            for group, inner in enumerate(self.inners):
                train(inner, group, step)
            fragment = self.step % len(self.forms)
            shared = self.globals[fragment]
            mine = [one[fragment] for one in self.locals]
            if (step + 1) % period == (period - self.delay) % period:
                gradients = [
                    sum(original - one[number] for one in mine) * (1 / self.groups)
                    for number, original in enumerate(shared)
                ]
            if (step + 1) % period:
                continue
            if attempt not in self.rejected:
                for original, gradient in zip(shared, gradients, strict=True):
                    original.grad = gradient
                self.outers[fragment].step()
                self.step += 1
            weight = self.alpha if attempt not in self.rejected else 0.0
            for one in mine:
                for parameter, original in zip(one, shared, strict=True):
                    parameter.copy_(torch.lerp(original, parameter, weight))
            attempt += 1
