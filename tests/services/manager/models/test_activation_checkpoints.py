"""Activation checkpoints of torch under the wrapper of a model, reentrant ones too."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from keepstep import DistributedDataParallel, Manager, PureDistributedDataParallel
from tests.services.manager.groups import manager, together

DEADLINE = 60
PASSES = {"a": [1.0, -2.0], "b": [3.0, 0.5]}
"""Inputs of each group."""

plain, modern, reentrant = None, False, True
"""No checkpoints, and both kinds: what ``use_reentrant`` is."""


class Net(nn.Module):
    """Checkpointed layers, one of them twice and one below a checkpoint of its own, and one that is not used."""

    def __init__(self, kind: bool | None) -> None:
        super().__init__()
        self.kind = kind
        self.first, self.twice = nn.Linear(4, 6), nn.Linear(6, 6)
        self.nested, self.inner = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm, self.last, self.unused = nn.BatchNorm1d(6), nn.Linear(6, 1), nn.Linear(5, 5)
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                numbers = torch.arange(parameter.numel(), dtype=torch.float32)
                parameter.copy_(torch.sin(number + numbers).view_as(parameter) / 2)

    def run(self, layer: Any, x: torch.Tensor) -> torch.Tensor:
        if self.kind is None or not torch.is_grad_enabled():  # torch warns of a reentrant one within another's forward
            return layer(x)
        return checkpoint(layer, x, use_reentrant=self.kind)

    def nest(self, x: torch.Tensor) -> torch.Tensor:
        return self.run(self.inner, self.nested(x).tanh())

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.run(self.twice, self.run(self.twice, self.first(x))).tanh()
        return {"loss": self.last(self.norm(self.run(self.nest, x))).square().mean(), "x": x}


def batch(value: float) -> torch.Tensor:
    return torch.linspace(value, value + 1, 12).view(3, 4)


def gradients(model: nn.Module) -> torch.Tensor:
    return torch.cat([torch.zeros_like(p).view(-1) if p.grad is None else p.grad.view(-1) for p in model.parameters()])


def expected(passes: int) -> torch.Tensor:
    """The mean over the groups of what plain torch gives, accumulated over so many passes."""
    all_groups = []
    for values in PASSES.values():
        model = Net(plain)
        for value in values[:passes]:
            model(batch(value))["loss"].backward()
        all_groups.append(gradients(model))
    return torch.stack(all_groups).mean(0)


def train(lighthouse: str, kinds: Sequence[bool | None], pure: bool = False, passes: int = 1, steps: int = 3) -> Any:
    """Gradients of every step of two groups, whose weights do not change. ``kinds``: of each group's checkpoints."""
    ready = threading.Barrier(2)

    def group(name: str, kind: bool | None) -> list[torch.Tensor]:
        model = Net(kind)
        with manager(lighthouse, name, min_replica_size=2, init_sync=False) as m:
            ddp: Any
            if pure:
                ddp = PureDistributedDataParallel(m, model)
            else:
                ddp = DistributedDataParallel(m, model, sync_buffers=False, bucket_cap_mb=0.0001)
            ready.wait(DEADLINE)
            return [one_step(m, ddp, PASSES[name][:passes]) for _ in range(steps)]

    both = together(lambda: group("a", kinds[0]), lambda: group("b", kinds[1]))
    return [one for group_of_steps in both for one in group_of_steps]


def one_step(m: Manager, ddp: Any, values: list[float]) -> torch.Tensor:
    ddp.module.zero_grad()
    m.start_quorum()
    for value in values:
        last = value == values[-1]
        with contextlib.nullcontext() if last else ddp.no_sync():
            ddp(batch(value))["loss"].backward()
    assert m.should_commit(), m.errored()
    return gradients(ddp.module)


@pytest.mark.parametrize("passes", [1, 2], ids=["one pass", "accumulated"])
@pytest.mark.parametrize("kind", [modern, reentrant], ids=["non-reentrant", "reentrant"])
def test_checkpointed_gradients_are_averaged_over_the_groups(lighthouse, kind, passes):
    for one in train(lighthouse, [kind, kind], passes=passes):
        torch.testing.assert_close(one, expected(passes))


def test_a_group_with_reentrant_checkpoints_averages_with_one_without(lighthouse):
    for one in train(lighthouse, [reentrant, plain]):
        torch.testing.assert_close(one, expected(1))


@pytest.mark.parametrize("kind", [modern, reentrant], ids=["non-reentrant", "reentrant"])
def test_a_wrapper_that_averages_each_parameter_averages_checkpointed_ones_too(lighthouse, kind):
    for one in train(lighthouse, [kind, kind], pure=True):
        torch.testing.assert_close(one, expected(1))


def test_checkpoints_may_be_switched_on_and_off_between_steps(lighthouse):
    model = Net(plain)
    with manager(lighthouse, "a") as m:
        ddp = DistributedDataParallel(m, model, sync_buffers=False)
        for kind in (plain, reentrant, modern, reentrant, plain):
            model.kind = kind
            reference = Net(plain)
            reference(batch(2.0))["loss"].backward()
            torch.testing.assert_close(one_step(m, ddp, [2.0]), gradients(reference))


@pytest.mark.parametrize("second", [plain, modern, reentrant], ids=["plain", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("first", [plain, reentrant], ids=["plain", "reentrant"])
def test_two_forward_passes_before_one_backward_pass_count_both(lighthouse, first, second):
    reference = Net(plain)
    (reference(batch(1.0))["loss"] + reference(batch(2.0))["loss"]).backward()
    with manager(lighthouse, "a") as m:
        ddp = DistributedDataParallel(m, Net(first), sync_buffers=False)
        m.start_quorum()
        loss = ddp(batch(1.0))["loss"]
        ddp.module.kind = second
        (loss + ddp(batch(2.0))["loss"]).backward()
        assert m.should_commit()
        torch.testing.assert_close(gradients(ddp.module), gradients(reference))


@pytest.mark.parametrize("then", [plain, reentrant], ids=["plain", "reentrant"])
@pytest.mark.parametrize("first", [plain, reentrant], ids=["plain", "reentrant"])
def test_after_a_backward_pass_that_raised_the_next_step_averages_all(lighthouse, first, then):
    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_: Any, _gradient: torch.Tensor) -> Any:
            raise ValueError("out of memory")

    model = Net(first)
    whole = model.first
    with manager(lighthouse, "a") as m:
        ddp = DistributedDataParallel(m, model, sync_buffers=False)
        model.first = nn.Sequential(whole)
        breaks = model.first.register_forward_hook(lambda *about: Broken.apply(about[2]))
        with pytest.raises(ValueError, match="out of memory"):
            one_step(m, ddp, [1.0])
        breaks.remove()
        model.first, model.kind = whole, then
        reference = Net(plain)
        reference(batch(2.0))["loss"].backward()
        torch.testing.assert_close(one_step(m, ddp, [2.0]), gradients(reference))


def test_a_peer_that_dies_in_the_backward_pass_rejects_the_step_and_raises_nothing(lighthouse):
    ready, begun, gone = threading.Barrier(2), threading.Barrier(2), threading.Event()

    def survivor() -> list[bool]:
        model = Net(reentrant)
        with manager(lighthouse, "a", init_sync=False) as m:
            ddp = DistributedDataParallel(m, model, sync_buffers=False)
            committed = []
            ready.wait(DEADLINE)
            for number in range(2):
                m.start_quorum()
                if number == 0:
                    m.wait_quorum()
                    begun.wait(DEADLINE)
                    assert gone.wait(DEADLINE)
                ddp(batch(1.0))["loss"].backward()
                committed.append(m.should_commit())
            return committed

    def dies() -> None:
        with manager(lighthouse, "b", init_sync=False) as m:
            DistributedDataParallel(m, Net(reentrant), sync_buffers=False)
            ready.wait(DEADLINE)
            m.start_quorum()
            m.wait_quorum()
            begun.wait(DEADLINE)
        gone.set()

    assert together(survivor, dies)[0] == [False, True]


class OfAnotherLibrary(torch.autograd.Function):
    """A reentrant checkpoint that keepstep does not know."""

    @staticmethod
    def forward(context: Any, layer: Any, x: torch.Tensor) -> torch.Tensor:
        context.layer, context.x = layer, x.detach()
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        with torch.enable_grad():
            x = context.x.requires_grad_()
            torch.autograd.backward(context.layer(x), gradients)
        return None, x.grad


@pytest.mark.parametrize("wrapper", [DistributedDataParallel, PureDistributedDataParallel])
def test_a_reentrant_checkpoint_of_another_library_is_averaged_in_parts(lighthouse, wrapper):
    ready = threading.Barrier(2)

    def twice(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return OfAnotherLibrary.apply(layer, OfAnotherLibrary.apply(layer, x.requires_grad_()).tanh()).square().sum()

    def linear() -> nn.Linear:
        layer = nn.Linear(2, 2)
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([[1.0, -0.5], [0.5, 2.0]]))
            layer.bias.fill_(0.1)
        return layer

    def group(name: str, scale: float) -> torch.Tensor:
        layer = linear()
        with manager(lighthouse, name, min_replica_size=2, init_sync=False) as m:
            ddp = wrapper(m, layer)
            ready.wait(DEADLINE)
            m.start_quorum()
            twice(ddp, torch.full((1, 2), scale)).backward()
            assert m.should_commit(), m.errored()
            ready.wait(DEADLINE)
            return gradients(layer)

    alone = []
    for scale in (1.0, 3.0):
        alone.append(linear())
        twice(alone[-1], torch.full((1, 2), scale)).backward()
    mean = torch.stack([gradients(one) for one in alone]).mean(0)
    for result in together(lambda: group("a", 1.0), lambda: group("b", 3.0)):
        torch.testing.assert_close(result, mean)
