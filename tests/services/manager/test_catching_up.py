"""A group joins without a stall: it follows the steps of the others, and then replays them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from keepstep import DistributedDataParallel, HTTPTransport, Manager, Optimizer
from keepstep.checkpointing.errors import TransferError
from keepstep_mesh.errors import KeepstepError
from tests.services.manager.groups import SECOND, events, manager, together

LAST_STEP = 30
FOLLOWED = 5


class Gate(HTTPTransport[dict[str, Any]]):
    """Receives only when it may. ``fails``: number of receives that fail at the gate."""

    def __init__(self, fails: int = 0) -> None:
        super().__init__(timeout=30 * SECOND, num_chunks=2, hostname="127.0.0.1")
        self.open = threading.Event()
        self.fails = fails

    def recv_checkpoint(self, *args: Any, **options: Any) -> dict[str, Any]:
        assert self.open.wait(60)
        if self.fails:
            self.fails -= 1
            raise TransferError("the link broke")
        return super().recv_checkpoint(*args, **options)


class Net(nn.Module):
    """Has averaged buffers (running statistics) and a copied one (the number of batches)."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.body = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.01)


class Group:
    """A group that trains with a scheduler and clipped gradients, up to ``LAST_STEP``."""

    def __init__(self, m: Manager, seed: int, inner: Callable[[Any], torch.optim.Optimizer] = adamw, **options: Any):
        self.m, self.model = m, Net(seed)
        self.ddp = DistributedDataParallel(m, self.model)
        self.inner = inner(self.model.parameters())
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.inner, 0.9)
        self.optimizer = Optimizer(m, self.inner, catch_up=True, after_commit=[self.schedule.step], **options)
        self.noise = torch.Generator().manual_seed(seed)
        m.set_state_dict_fns(self.load, self.state)

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimizer": self.inner.state_dict(),
            "schedule": self.schedule.state_dict(),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.inner.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])

    def step(self) -> bool:
        self.optimizer.zero_grad()
        self.ddp(torch.randn(8, 6, generator=self.noise)).square().sum().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        return self.optimizer.step()

    def result(self) -> tuple[int, int, list[bytes]]:
        """Step, batches, and every number of the state, bit for bit."""
        tensors = [*self.model.state_dict().values()]
        tensors += [
            one for each in self.inner.state_dict()["state"].values() for one in each.values() if one is not None
        ]
        numbers = torch.tensor([self.inner.param_groups[0]["lr"], self.schedule.last_epoch])
        bits = [one.detach().contiguous().numpy().tobytes() for one in (*tensors, numbers)]
        return self.m.current_step(), self.m.batches_committed(), bits


def veteran(lighthouse: str, ahead: threading.Event, joined: threading.Event, **group: Any) -> Any:
    with manager(lighthouse, "a") as m:
        own = Group(m, 1, **group)
        for _ in range(3):
            assert own.step()
        ahead.set()
        assert joined.wait(60)
        while m.current_step() < LAST_STEP:
            own.step()
        m.finish()
        return own.result()


@pytest.mark.parametrize("inner", [sgd, adamw])
def test_a_group_that_catches_up_is_equal_bit_for_bit(lighthouse, steps, inner):
    ahead, joined = threading.Event(), threading.Event()
    transport = Gate()

    def joiner() -> Any:
        assert ahead.wait(60)
        with manager(lighthouse, "b", checkpoint_transport=transport) as m:
            own = Group(m, 2, inner)
            joined.set()
            followed = 0
            while m.current_step() < LAST_STEP:
                stepped = own.step()
                followed += m.catching_up
                assert stepped is not m.catching_up or m.errored()
                if followed == FOLLOWED:
                    with pytest.raises(KeepstepError, match="catches up, and its weights are older"):
                        m.state_dict()
                    with pytest.raises(KeepstepError, match="save only while"):
                        m.save_checkpoint()
                    assert m.num_participants() == 1, "it is not in the divisor"
                    transport.open.set()
            took_part = m.num_participants()
            m.finish()
            return own.result(), followed, took_part

    a, (b, followed, took_part) = together(lambda: veteran(lighthouse, ahead, joined, inner=inner), joiner)
    assert b == a
    assert followed >= FOLLOWED, "the others took these steps while the state did not arrive"
    assert took_part == 2, "and counted it afterwards"
    assert {"follows", "caught_up"} < set(events(steps))
    assert "healed" not in events(steps)
