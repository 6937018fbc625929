"""Two optimizers on one Manager (a GAN), as docs/training.md says it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from keepstep import DistributedDataParallel, Manager, Optimizer
from tests.services.manager.groups import manager, together, until_connected

DEADLINE = 60


class Gan:
    """A generator and a discriminator of different sizes, that begin apart in each group."""

    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.g, self.d = nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
        with torch.no_grad():
            for parameter in (*self.g.parameters(), *self.d.parameters()):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
        self.adam_g = torch.optim.Adam(self.g.parameters(), lr=1e-3)
        self.adam_d = torch.optim.Adam(self.d.parameters(), lr=1e-3)
        self.noise = generator

    def parts(self) -> dict[str, Any]:
        return {"g": self.g, "d": self.d, "adam_g": self.adam_g, "adam_d": self.adam_d}

    def state(self) -> dict[str, Any]:
        return {key: part.state_dict() for key, part in self.parts().items()}

    def load(self, state: dict[str, Any]) -> None:
        for key, part in self.parts().items():
            part.load_state_dict(state[key])

    def z(self) -> torch.Tensor:
        return torch.randn(8, 3, generator=self.noise)

    def weights(self) -> list[float]:
        return [value for part in (self.g, self.d) for p in part.parameters() for value in p.detach().view(-1).tolist()]


def one_step_for_both(m: Manager, gan: Gan) -> Callable[[], bool]:
    ddp_g, ddp_d = DistributedDataParallel(m, gan.g), DistributedDataParallel(m, gan.d)
    optimizer_g, optimizer_d = Optimizer(m, gan.adam_g), Optimizer(m, gan.adam_d)

    def step() -> bool:
        optimizer_d.zero_grad()
        optimizer_g.zero_grad()
        fake = ddp_g(gan.z())
        ddp_d(fake.detach()).mean().backward()
        (-gan.d(fake).mean()).backward(inputs=list(gan.g.parameters()))
        with m.committing() as committed:
            if committed:
                gan.adam_d.step()
                gan.adam_g.step()
        return committed

    return step


def alternating(m: Manager, gan: Gan) -> Callable[[], bool]:
    ddp_g, ddp_d = DistributedDataParallel(m, gan.g), DistributedDataParallel(m, gan.d)
    optimizer_g, optimizer_d = Optimizer(m, gan.adam_g), Optimizer(m, gan.adam_d)

    def step() -> bool:
        m.start_quorum()
        if m.current_step() % 2 == 0:
            optimizer_d.zero_grad()
            ddp_d(gan.g(gan.z()).detach()).mean().backward()
            return optimizer_d.step()
        optimizer_g.zero_grad()
        (-gan.d(ddp_g(gan.z())).mean()).backward()
        return optimizer_g.step()

    return step


def taking_turns(m: Manager, gan: Gan) -> Callable[[], bool]:
    """The usual loop, in which the place in the loop decides whose turn it is."""
    ddp_g, ddp_d = DistributedDataParallel(m, gan.g), DistributedDataParallel(m, gan.d)
    optimizer_g, optimizer_d = Optimizer(m, gan.adam_g), Optimizer(m, gan.adam_d)

    def turns() -> Iterator[bool]:
        while True:
            optimizer_d.zero_grad()
            ddp_d(gan.g(gan.z()).detach()).mean().backward()
            yield optimizer_d.step()
            optimizer_g.zero_grad()
            (-gan.d(ddp_g(gan.z())).mean()).backward()
            yield optimizer_g.step()

    return turns().__next__


def test_a_group_that_joins_while_the_others_finish_does_not_wait_for_their_turn(lighthouse, caplog):
    reached, done = threading.Event(), threading.Barrier(2)

    def group(name: str, seed: int) -> list[float]:
        gan = Gan(seed)
        if name == "b":
            assert reached.wait(DEADLINE)
        with manager(lighthouse, name) as m:
            m.set_state_dict_fns(gan.load, gan.state)
            step = taking_turns(m, gan)
            while m.current_step() < 6:
                step()
            if name == "a":
                reached.set()
                until_connected(lighthouse, "b", asked=True)
            m.finish()
            done.wait(DEADLINE)
            return gan.weights()

    weights_a, weights_b = together(lambda: group("a", 1), lambda: group("b", 2))
    assert weights_a == weights_b
    assert "not set in the rendezvous" not in caplog.text


@pytest.mark.parametrize(
    ("loop", "sync"),
    [
        (one_step_for_both, False),
        (one_step_for_both, True),
        (alternating, True),
        (taking_turns, False),
        (taking_turns, True),
    ],
    ids=["one step, async", "one step, sync", "alternating", "taking turns, async", "taking turns, sync"],
)
@pytest.mark.parametrize("joins_at", [4, 5], ids=["even", "odd"])
def test_a_group_that_joins_trains_both_networks_in_step_with_the_others(lighthouse, loop, sync, joins_at):
    reached, joined, done = threading.Event(), threading.Event(), threading.Barrier(2)
    final = 16

    def group(name: str, seed: int) -> tuple[list[float], list[bool]]:
        gan = Gan(seed)
        if name == "b":
            assert reached.wait(DEADLINE)
        with manager(lighthouse, name, use_async_quorum=not sync) as m:
            m.set_state_dict_fns(gan.load, gan.state)
            step = loop(m, gan)
            committed = []
            if name == "b":
                joined.set()
            while m.current_step() < final:
                committed.append(step())
                if m.current_step() == joins_at and not reached.is_set():
                    reached.set()
                    assert joined.wait(DEADLINE)
                    until_connected(lighthouse, "b", asked=True)
            done.wait(DEADLINE)
            return gan.weights(), committed

    (weights_a, _), (weights_b, committed_b) = together(lambda: group("a", 1), lambda: group("b", 2))
    assert weights_a == weights_b
    assert len(committed_b) > 2
    left_out = loop is taking_turns and joins_at == 5  # the turn of the generator, and b begins with the other network
    assert committed_b[0] is not left_out
    assert all(committed_b[1:])
